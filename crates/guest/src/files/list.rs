//! Lists directories, to a depth. Blocking. It must survive trees that change, loop or are absurdly large.

use std::{ffi::OsString, fs, io, path::Path};

use super::{blocking::Cancelled, entry, operations::rpc_error, owners::Owners, pseudo::Border};
use crate::{
    proto::filesystem::EntryInfo,
    rpc::{Code, RpcError, RpcResult},
};

/// Most entries in one answer: at some 500 bytes each this bounds what a listing takes of a small guest's memory.
pub const MAX_ENTRIES: usize = 200_000;

/// What is below the directory `path`, down to `depth` levels (0 means 1), depth first, names in byte order. Symlinked
/// directories are not entered, except `path` itself, whose text stays the prefix of every entry's path; nor are pseudo
/// file systems such as `/proc`, unless `path` is in one.
///
/// # Errors
/// `not_found`, `invalid_argument` if it is no directory, `failed_precondition` for a symlink loop, `resource_exhausted`
/// for more than `MAX_ENTRIES` entries, `canceled` soon after `cancelled` is set.
pub fn list(
    path: &Path,
    depth: u32,
    owners: &Owners,
    cancelled: &Cancelled,
) -> RpcResult<Vec<EntryInfo>> {
    list_bounded(path, depth, owners, MAX_ENTRIES, cancelled)
}

fn list_bounded(
    path: &Path,
    depth: u32,
    owners: &Owners,
    limit: usize,
    cancelled: &Cancelled,
) -> RpcResult<Vec<EntryInfo>> {
    let failed = |error: io::Error| rpc_error("list", path, &error);
    let meta = fs::metadata(path).map_err(failed)?;
    if !meta.is_dir() {
        return Err(RpcError::new(
            Code::InvalidArgument,
            format!("path is not a directory: '{}'", path.display()),
        ));
    }
    let mut border = Border::around(path, &meta).map_err(|errno| failed(errno.into()))?;
    let depth = usize::try_from(depth.max(1)).unwrap_or(usize::MAX);
    let too_many = || {
        RpcError::new(
            Code::ResourceExhausted,
            format!(
                "'{}' has more than {limit} entries; list with a smaller depth",
                path.display()
            ),
        )
    };
    let mut entries = Vec::new();
    let mut current = path.to_path_buf();
    let fatal = |error: Interrupted| match error {
        Interrupted::Failed(error) => failed(error),
        Interrupted::TooMany => too_many(),
        Interrupted::Cancelled(error) => error,
    };
    let mut levels = vec![names(path, limit, cancelled).map_err(fatal)?.into_iter()];
    while let Some(level) = levels.last_mut() {
        cancelled.check()?;
        let Some(name) = level.next() else {
            levels.pop();
            current.pop();
            continue;
        };
        current.push(name);
        match fs::symlink_metadata(&current) {
            Ok(own) => {
                if entries.len() == limit {
                    return Err(too_many());
                }
                entries.push(entry::describe_known(&current, &own, owners));
                if own.is_dir() && levels.len() < depth && border.admits(&current, &own) {
                    match names(&current, limit, cancelled) {
                        Ok(below) => {
                            levels.push(below.into_iter());
                            continue;
                        }
                        // One that vanished, is too deep for a path or may not be read is listed but not entered.
                        Err(Interrupted::Failed(_)) => {}
                        Err(other) => return Err(fatal(other)),
                    }
                }
            }
            Err(error) if skipped(&error) => {}
            Err(error) => return Err(rpc_error("list", &current, &error)),
        }
        current.pop();
    }
    Ok(entries)
}

/// Why a directory was not read to its end.
enum Interrupted {
    Failed(io::Error),
    TooMany,
    Cancelled(RpcError),
}

/// The sorted names in a directory, at most `limit`.
fn names(path: &Path, limit: usize, cancelled: &Cancelled) -> Result<Vec<OsString>, Interrupted> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(Interrupted::Failed)? {
        cancelled.check().map_err(Interrupted::Cancelled)?;
        match entry {
            Ok(entry) => names.push(entry.file_name()),
            Err(error) if skipped(&error) => break,
            Err(error) => return Err(Interrupted::Failed(error)),
        }
        if names.len() > limit {
            return Err(Interrupted::TooMany);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Errors of entries that are gone or cannot be named by a path.
fn skipped(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ENOENT
                | libc::ENOTDIR
                | libc::ELOOP
                | libc::ESTALE
                | libc::ENAMETOOLONG
                | libc::ESRCH
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn listed(path: &Path, depth: u32) -> RpcResult<Vec<EntryInfo>> {
        list(path, depth, &Owners::default(), &Cancelled::default())
    }

    fn paths(root: &Path, depth: u32) -> Vec<String> {
        listed(root, depth)
            .unwrap()
            .into_iter()
            .map(|entry| entry.path[root.as_os_str().len() + 1..].to_owned())
            .collect()
    }

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("b/c")).unwrap();
        for file in ["a", "b/c/d", "b/a", "z"] {
            fs::write(dir.path().join(file), "").unwrap();
        }
        symlink("b", dir.path().join("link")).unwrap();
        dir
    }

    #[test]
    fn depth_and_order() {
        let dir = tree();
        let one = ["a", "b", "link", "z"];
        assert_eq!(paths(dir.path(), 0), one);
        assert_eq!(paths(dir.path(), 1), one);
        assert_eq!(paths(dir.path(), 2), ["a", "b", "b/a", "b/c", "link", "z"]);
        assert_eq!(
            paths(dir.path(), u32::MAX),
            ["a", "b", "b/a", "b/c", "b/c/d", "link", "z"]
        );
    }

    #[test]
    fn symlinked_root_keeps_its_name() {
        let dir = tree();
        assert_eq!(paths(&dir.path().join("link"), 9), ["a", "c", "c/d"]);
    }

    #[test]
    fn refusals() {
        let dir = tree();
        symlink("loop", dir.path().join("loop")).unwrap();
        for (name, code) in [
            ("none", Code::NotFound),
            ("a/x", Code::NotFound),
            ("a", Code::InvalidArgument),
            ("loop", Code::FailedPrecondition),
        ] {
            let error = listed(&dir.path().join(name), 1).unwrap_err();
            assert_eq!(error.code, code, "{name}");
        }
        let error =
            list_bounded(dir.path(), 3, &Owners::default(), 4, &Cancelled::default()).unwrap_err();
        assert_eq!(error.code, Code::ResourceExhausted);
    }

    #[test]
    fn pseudo_file_systems_are_listed_but_not_entered() {
        let below_root = listed(Path::new("/"), 2).unwrap();
        assert!(below_root.iter().any(|entry| entry.path == "/proc"));
        assert!(!below_root
            .iter()
            .any(|entry| entry.path.starts_with("/proc/") || entry.path.starts_with("/sys/")));
        let below_proc = listed(Path::new("/proc/sys"), 3).unwrap();
        assert!(below_proc
            .iter()
            .any(|entry| entry.path == "/proc/sys/kernel/ostype"));
    }

    #[test]
    fn stops_when_nobody_waits() {
        let wanted = super::super::blocking::CancelOnDrop::default();
        let flag = wanted.flag();
        let dir = tree();
        assert!(list(dir.path(), 9, &Owners::default(), &flag).is_ok());
        drop(wanted);
        let error = list(dir.path(), 9, &Owners::default(), &flag).unwrap_err();
        assert_eq!(error.code, Code::Canceled);
    }

    #[test]
    fn survives_a_tree_deeper_than_a_path() {
        let dir = tempfile::tempdir().unwrap();
        let name = "d".repeat(200);
        let flags = nix::fcntl::OFlag::O_DIRECTORY | nix::fcntl::OFlag::O_CLOEXEC;
        let mode = nix::sys::stat::Mode::S_IRWXU;
        let mut at = nix::fcntl::open(dir.path(), flags, mode).unwrap();
        for _ in 0..40 {
            nix::sys::stat::mkdirat(&at, name.as_str(), mode).unwrap();
            at = nix::fcntl::openat(&at, name.as_str(), flags, mode).unwrap();
        }
        drop(at);
        let found = listed(dir.path(), u32::MAX).unwrap();
        assert!((15..=21).contains(&found.len()), "{}", found.len());
        super::super::remove::remove_tree(&dir.path().join(&name)).unwrap();
    }
}
