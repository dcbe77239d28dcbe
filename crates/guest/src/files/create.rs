//! Creates files and directories for a user: the agent is root, so what it makes must be handed over. Blocking.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{fchown, DirBuilderExt, OpenOptionsExt},
    path::Path,
};

use super::failure::{from_io, is_directory as directory_in_the_way, not_regular};
use crate::agent::error::HttpError;

/// Mode of new directories. The process's umask can only take away.
const DIRECTORY_MODE: u32 = 0o755;
pub const FILE_MODE: u32 = 0o644;

/// Who gets what is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// Creates the directory `path`, whose parent exists, for `owner`.
///
/// # Errors
/// Those of mkdir(2), among them `AlreadyExists`.
pub fn make_directory(path: &Path, owner: Owner) -> io::Result<()> {
    fs::DirBuilder::new().mode(DIRECTORY_MODE).create(path)?;
    // Through a descriptor that cannot be a symlink: the parent may belong to somebody who swaps the new directory.
    let made = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)?;
    fchown(&made, Some(owner.uid), Some(owner.gid))
}

/// Creates the missing parents of `path`; those that exist stay as they are.
///
/// # Errors
/// Those of mkdir(2); `NotADirectory` if a parent is something else.
pub fn make_parents(path: &Path, owner: Owner) -> io::Result<()> {
    let Some(parent) = path.parent() else {
        return Ok(());
    };
    if is_directory(parent)? {
        return Ok(());
    }
    let mut missing = vec![parent];
    for ancestor in parent.ancestors().skip(1) {
        if is_directory(ancestor)? {
            break;
        }
        missing.push(ancestor);
    }
    for directory in missing.into_iter().rev() {
        match make_directory(directory, owner) {
            // Somebody else made it meanwhile, or it is a link that leads nowhere.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if !is_directory(directory)? {
                    return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
                }
            }
            other => other?,
        }
    }
    Ok(())
}

/// Whether a directory is there; false if nothing is.
fn is_directory(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Ok(true),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// A file opened for writing its whole content.
#[derive(Debug)]
pub struct Target {
    pub file: File,
    /// False if a file was there and has been truncated.
    pub created: bool,
}

/// Opens `path` for an upload: parents and the file are created, an existing file is truncated in place, a symlink is
/// written through, and the file is handed to `owner`.
///
/// # Errors
/// 400 if something other than a file is in the way, 507 if the disk is full, else as `failure::from_io`.
pub fn open_target(path: &Path, owner: Owner) -> Result<Target, HttpError> {
    let fail = |error: io::Error| from_io("write", path, &error);
    make_parents(path, owner).map_err(fail)?;
    let target = open_or_create(path).map_err(fail)?;
    let meta = target.file.metadata().map_err(fail)?;
    if meta.is_dir() {
        return Err(directory_in_the_way(path));
    }
    if !meta.is_file() {
        return Err(not_regular(path));
    }
    if !target.created {
        target.file.set_len(0).map_err(fail)?;
    }
    fchown(&target.file, Some(owner.uid), Some(owner.gid)).map_err(fail)?;
    Ok(target)
}

/// O_CREAT only if nothing is there: in sticky directories `fs.protected_regular` refuses it, even to root, for an
/// existing file of somebody else. O_NONBLOCK keeps a pipe nobody reads from blocking the open.
fn open_or_create(path: &Path) -> io::Result<Target> {
    let mut existing = OpenOptions::new();
    existing
        .write(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK);
    match existing.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => {
            return opened.map(|file| Target {
                file,
                created: false,
            });
        }
    }
    let mut new = existing.clone();
    new.create_new(true).mode(FILE_MODE);
    match new.open(path) {
        // A link to a file that is not there yet, or a file somebody made just now.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let file = existing
                .create(true)
                .truncate(false)
                .mode(FILE_MODE)
                .open(path)?;
            Ok(Target {
                file,
                created: false,
            })
        }
        made => made.map(|file| Target {
            file,
            created: true,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::Write,
        os::unix::fs::{symlink, MetadataExt},
    };

    const SOMEBODY: Owner = Owner {
        uid: 12345,
        gid: 54321,
    };

    fn me() -> Owner {
        Owner {
            uid: nix::unistd::getuid().as_raw(),
            gid: nix::unistd::getgid().as_raw(),
        }
    }

    /// The owner to hand things to: somebody else where the tests may do that.
    fn owner() -> Owner {
        if me().uid == 0 {
            SOMEBODY
        } else {
            me()
        }
    }

    #[test]
    fn parents_and_file_belong_to_the_owner() {
        let dir = tempfile::tempdir().unwrap();
        let before = fs::metadata(dir.path()).unwrap().uid();
        let path = dir.path().join("a/b/c");
        assert!(open_target(&path, owner()).unwrap().created);
        for (made, mode) in [("a", 0o40755), ("a/b", 0o40755), ("a/b/c", 0o100644)] {
            let meta = fs::metadata(dir.path().join(made)).unwrap();
            assert_eq!(
                (meta.uid(), meta.gid(), meta.mode()),
                (owner().uid, owner().gid, mode)
            );
        }
        assert_eq!(fs::metadata(dir.path()).unwrap().uid(), before);
    }

    #[test]
    fn existing_file_is_truncated_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "old content").unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        let mut target = open_target(&path, owner()).unwrap();
        assert!(!target.created);
        target.file.write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.ino(), meta.uid()), (inode, owner().uid));
    }

    #[test]
    fn writes_through_links_even_to_what_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        symlink("real", dir.path().join("link")).unwrap();
        for text in ["one", "two"] {
            let mut target = open_target(&dir.path().join("link"), owner()).unwrap();
            target.file.write_all(text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(dir.path().join("real")).unwrap(), text);
        }
        assert!(fs::symlink_metadata(dir.path().join("link"))
            .unwrap()
            .is_symlink());
    }

    #[test]
    fn refuses_what_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "").unwrap();
        nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        for name in ["", "f/x", "pipe", "loop", "loop/x"] {
            let failure = open_target(&dir.path().join(name), owner()).unwrap_err();
            assert_eq!(failure.status, 400, "{name}: {failure:?}");
        }
    }
}
