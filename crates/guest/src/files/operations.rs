//! The unary calls of `filesystem.Filesystem` on resolved paths: stat, make, move, remove. Blocking; knows no wire.

use std::{fs, io, path::Path};

use super::{
    create::{make_directory, make_parents, Owner},
    entry,
    failure::is_full,
    owners::Owners,
    remove,
};
use crate::{
    proto::filesystem::EntryInfo,
    rpc::{Code, RpcError, RpcResult},
};

/// The RPC error for a system error met while doing `doing` (a verb) with `path`.
pub fn rpc_error(doing: &str, path: &Path, error: &io::Error) -> RpcError {
    let code = match error.raw_os_error() {
        // Below a file there is nothing.
        Some(libc::ENOENT | libc::ENOTDIR) => Code::NotFound,
        Some(libc::EEXIST) => Code::AlreadyExists,
        Some(libc::ELOOP | libc::ENOTEMPTY | libc::EXDEV | libc::EBUSY | libc::EROFS) => {
            Code::FailedPrecondition
        }
        Some(libc::EINVAL | libc::ENAMETOOLONG | libc::EISDIR) => Code::InvalidArgument,
        Some(libc::EACCES | libc::EPERM) => Code::PermissionDenied,
        Some(libc::EMFILE | libc::ENFILE) => Code::ResourceExhausted,
        _ => Code::Internal,
    };
    let path = path.display();
    if code == Code::NotFound {
        return RpcError::new(code, format!("path '{path}' does not exist"));
    }
    // Not `resource_exhausted`: clients take that for a limit on requests, which waiting would lift.
    if is_full(error) {
        return RpcError::new(
            Code::Internal,
            format!("cannot {doing} '{path}': no space left on the disk of the sandbox"),
        );
    }
    RpcError::new(code, format!("cannot {doing} '{path}': {error}"))
}

/// Describes what is at `path`.
///
/// # Errors
/// `not_found`.
pub fn stat(path: &Path) -> RpcResult<EntryInfo> {
    entry::describe(path, &Owners::default()).map_err(|error| rpc_error("stat", path, &error))
}

/// Creates the directory `path` and its missing parents for `owner`.
///
/// # Errors
/// `already_exists` for a directory, `invalid_argument` if something else is there or in the way.
pub fn make_dir(path: &Path, owner: Owner) -> RpcResult<EntryInfo> {
    let in_the_way = |error: &io::Error| match error.raw_os_error() {
        Some(libc::ENOTDIR) => RpcError::new(
            Code::InvalidArgument,
            format!(
                "cannot make directory '{}': a parent is not a directory",
                path.display()
            ),
        ),
        _ => rpc_error("make directory", path, error),
    };
    make_parents(path, owner).map_err(|error| in_the_way(&error))?;
    match make_directory(path, owner) {
        Ok(()) => stat(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(match fs::metadata(path) {
                Ok(meta) if meta.is_dir() => RpcError::new(
                    Code::AlreadyExists,
                    format!("directory '{}' already exists", path.display()),
                ),
                _ => RpcError::new(
                    Code::InvalidArgument,
                    format!("path '{}' exists and is not a directory", path.display()),
                ),
            })
        }
        Err(error) => Err(in_the_way(&error)),
    }
}

/// Renames `source` to `destination`, replacing a file there; missing parents are created for `owner`.
///
/// # Errors
/// `not_found` for a missing source, `failed_precondition` across file systems or onto a filled directory.
pub fn move_entry(source: &Path, destination: &Path, owner: Owner) -> RpcResult<EntryInfo> {
    fs::symlink_metadata(source).map_err(|error| rpc_error("move", source, &error))?;
    let failed = |error: io::Error| match error.raw_os_error() {
        Some(libc::ENOTDIR) => RpcError::new(
            Code::InvalidArgument,
            format!("cannot move to '{}': {error}", destination.display()),
        ),
        Some(libc::EEXIST | libc::ENOTEMPTY) => RpcError::new(
            Code::FailedPrecondition,
            format!(
                "cannot move to '{}': the directory there is not empty",
                destination.display()
            ),
        ),
        Some(libc::EXDEV) => RpcError::new(
            Code::FailedPrecondition,
            format!(
                "cannot move '{}' to '{}': they are on different file systems; copy it instead",
                source.display(),
                destination.display()
            ),
        ),
        _ => rpc_error("move to", destination, &error),
    };
    make_parents(destination, owner).map_err(failed)?;
    fs::rename(source, destination).map_err(failed)?;
    stat(destination)
}

/// Removes what is at `path`, with everything in it. Nothing there is success.
///
/// # Errors
/// `invalid_argument` for the root directory; else what the system says.
pub fn remove(path: &Path) -> RpcResult<()> {
    if path == Path::new("/") {
        return Err(RpcError::new(
            Code::InvalidArgument,
            "the root directory cannot be removed",
        ));
    }
    match remove::remove_tree(path) {
        Err(error) if error.raw_os_error() != Some(libc::ENOTDIR) => {
            Err(rpc_error("remove", path, &error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, MetadataExt};

    fn owner() -> Owner {
        if nix::unistd::getuid().is_root() {
            Owner {
                uid: 12345,
                gid: 54321,
            }
        } else {
            Owner {
                uid: nix::unistd::getuid().as_raw(),
                gid: nix::unistd::getgid().as_raw(),
            }
        }
    }

    #[test]
    fn a_full_disk_is_no_limit_on_requests() {
        for errno in [libc::ENOSPC, libc::EDQUOT] {
            let error = rpc_error(
                "make directory",
                Path::new("/d"),
                &io::Error::from_raw_os_error(errno),
            );
            assert_eq!(error.code, Code::Internal);
            assert_eq!(
                error.message,
                "cannot make directory '/d': no space left on the disk of the sandbox"
            );
        }
    }

    #[test]
    fn make_dir_tells_directories_from_other_things() {
        let dir = tempfile::tempdir().unwrap();
        let made = make_dir(&dir.path().join("a/b"), owner()).unwrap();
        assert_eq!((made.name.as_str(), made.mode), ("b", 0o755));
        assert_eq!(
            fs::metadata(dir.path().join("a")).unwrap().uid(),
            owner().uid
        );
        fs::write(dir.path().join("f"), "").unwrap();
        symlink("a", dir.path().join("link")).unwrap();
        symlink("nowhere", dir.path().join("broken")).unwrap();
        for (name, code) in [
            ("a/b", Code::AlreadyExists),
            ("link", Code::AlreadyExists),
            ("f", Code::InvalidArgument),
            ("f/x", Code::InvalidArgument),
            ("broken", Code::InvalidArgument),
            ("broken/x", Code::InvalidArgument),
        ] {
            assert_eq!(
                make_dir(&dir.path().join(name), owner()).unwrap_err().code,
                code,
                "{name}"
            );
        }
    }

    #[test]
    fn move_renames_and_makes_parents() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("f"), "new").unwrap();
        fs::write(at("old"), "old").unwrap();
        let moved = move_entry(&at("f"), &at("p/q/g"), owner()).unwrap();
        assert_eq!(moved.path, at("p/q/g").to_str().unwrap());
        move_entry(&at("p/q/g"), &at("old"), owner()).unwrap();
        assert_eq!(fs::read_to_string(at("old")).unwrap(), "new");
        symlink("nowhere", at("broken")).unwrap();
        move_entry(&at("broken"), &at("still-broken"), owner()).unwrap();

        fs::create_dir_all(at("full/x")).unwrap();
        fs::create_dir(at("dir")).unwrap();
        for (from, to, code) in [
            ("none", "x", Code::NotFound),
            ("dir", "full", Code::FailedPrecondition),
            ("full", "full/x/y", Code::InvalidArgument),
            ("dir", "old/x", Code::InvalidArgument),
            ("old", "dir", Code::InvalidArgument),
        ] {
            assert_eq!(
                move_entry(&at(from), &at(to), owner()).unwrap_err().code,
                code,
                "{from} {to}"
            );
        }
    }

    #[test]
    fn remove_of_missing_succeeds_and_of_root_does_not() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "").unwrap();
        remove(&dir.path().join("none")).unwrap();
        remove(&dir.path().join("f/x")).unwrap();
        remove(&dir.path().join("f")).unwrap();
        assert!(!dir.path().join("f").exists());
        assert_eq!(
            remove(Path::new("/")).unwrap_err().code,
            Code::InvalidArgument
        );
    }
}
