//! Removes trees, however deep, and without ever following a symlink out of them. Blocking.

use std::{
    ffi::{CStr, CString, OsStr},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{openat, renameat, OFlag, AT_FDCWD},
    sys::stat::Mode,
    unistd::{unlinkat, UnlinkatFlags},
};

/// Levels walked with one open directory each. What is deeper is first moved up to the top, so neither open files nor
/// stack grow with the depth of a tree.
const MAX_OPEN_LEVELS: usize = 48;
/// Names read from a directory at a time.
const BATCH: usize = 1024;
/// Passes over the top directory before giving up on one that others keep filling.
const MAX_PASSES: usize = 100_000;

/// Removes the file, link or whole tree at `path`. Nothing there is success.
///
/// # Errors
/// Those of unlinkat(2), for example EBUSY for a mount point in the tree.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from(Errno::EINVAL))?;
    match unlink(AT_FDCWD, &name)? {
        Unlinked::Done => return Ok(()),
        Unlinked::Directory => {}
    }
    for _ in 0..MAX_PASSES {
        let mut top = match open_directory(AT_FDCWD, &name) {
            Err(Errno::ENOENT) => return Ok(()),
            opened => opened?,
        };
        let mut pass = Pass {
            top: top.as_fd().try_clone_to_owned()?,
            removed: 0,
            moved: 0,
        };
        pass.empty(&mut top, 1)?;
        match unlinkat(AT_FDCWD, name.as_c_str(), UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => return Ok(()),
            Err(Errno::ENOTEMPTY) if pass.removed + pass.moved > 0 => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::ENOTEMPTY.into())
}

enum Unlinked {
    /// It is gone, or never was.
    Done,
    Directory,
}

fn unlink(dir: impl AsFd, name: &CStr) -> nix::Result<Unlinked> {
    match unlinkat(dir, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(Unlinked::Done),
        Err(Errno::EISDIR) => Ok(Unlinked::Directory),
        Err(error) => Err(error),
    }
}

fn open_directory(dir: impl AsFd, name: &CStr) -> nix::Result<Dir> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Dir::from_fd(openat(dir, name, flags, Mode::empty())?)
}

/// One walk over everything below the top directory.
struct Pass {
    top: OwnedFd,
    removed: u64,
    moved: u64,
}

impl Pass {
    fn empty(&mut self, dir: &mut Dir, level: usize) -> nix::Result<()> {
        // Relative to its own descriptor, because iterating borrows the directory.
        let at = dir
            .as_fd()
            .try_clone_to_owned()
            .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))?;
        let mut entries = dir.iter();
        loop {
            // A bounded batch of names: directories can be huge. What a listing misses because the directory changes
            // under it is found by the next pass.
            let names: Vec<CString> = entries
                .by_ref()
                .filter_map(Result::ok)
                .map(|entry| entry.file_name().to_owned())
                .filter(|name| name.to_bytes() != b"." && name.to_bytes() != b"..")
                .take(BATCH)
                .collect();
            if names.is_empty() {
                return Ok(());
            }
            for name in names {
                self.remove_entry(at.as_fd(), &name, level)?;
            }
        }
    }

    fn remove_entry(&mut self, at: BorrowedFd<'_>, name: &CStr, level: usize) -> nix::Result<()> {
        if let Unlinked::Done = unlink(at, name)? {
            self.removed += 1;
            return Ok(());
        }
        if level >= MAX_OPEN_LEVELS {
            return self.move_to_top(at, name);
        }
        let mut below = match open_directory(at, name) {
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(()),
            opened => opened?,
        };
        self.empty(&mut below, level + 1)?;
        drop(below);
        match unlinkat(at, name, UnlinkatFlags::RemoveDir) {
            Ok(()) => self.removed += 1,
            // Changed under us, or its depth was moved away: the next pass sees to it.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ENOTEMPTY) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn move_to_top(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> nix::Result<()> {
        for attempt in 0..u32::MAX {
            let unique = format!(".removing-{}-{}-{attempt}", std::process::id(), self.moved);
            match renameat(dir, name, &self.top, OsStr::new(&unique)) {
                Ok(()) => {
                    self.moved += 1;
                    return Ok(());
                }
                Err(Errno::ENOENT) => return Ok(()),
                Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR | Errno::EISDIR) => {}
                Err(error) => return Err(error),
            }
        }
        Err(Errno::EEXIST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    #[test]
    fn removes_files_links_and_trees() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "x").unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::write(tree.join("a/b/f"), "x").unwrap();
        symlink(&outside, tree.join("a/link")).unwrap();
        symlink(&tree, dir.path().join("to-tree")).unwrap();

        remove_tree(&dir.path().join("to-tree")).unwrap();
        assert!(tree.exists());
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
        assert!(outside.join("kept").exists());
        remove_tree(&outside.join("kept")).unwrap();
        assert!(!outside.join("kept").exists());
    }

    #[test]
    fn missing_is_success() {
        let dir = tempfile::tempdir().unwrap();
        remove_tree(&dir.path().join("x")).unwrap();
        remove_tree(&dir.path().join("x/y/z")).unwrap();
    }

    #[test]
    fn depth_costs_neither_stack_nor_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        fs::create_dir(&top).unwrap();
        let mut at =
            nix::fcntl::open(&top, OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).unwrap();
        for _ in 0..5000 {
            nix::sys::stat::mkdirat(&at, "d", Mode::S_IRWXU).unwrap();
            at = openat(
                &at,
                "d",
                OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
                Mode::empty(),
            )
            .unwrap();
        }
        drop(at);
        remove_tree(&top).unwrap();
        assert!(!top.exists());
    }
}
