//! Unix sockets at a path: bound under a temporary name and renamed, so that a client finds the old one or the new one and
//! never nothing.
//!
//! Works for paths longer than a socket address holds, and in directories whose owner may try to trick us.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Longest queue of clients that are not accepted yet.
const BACKLOG: i32 = 128;

/// Listen at `path` with the given mode. With `as_directory`, owner and group are those of the directory. The listener
/// does not block.
///
/// # Errors
/// The operating system's; `InvalidInput` when the path names no file in a directory.
pub fn listen(path: &Path, mode: u32, as_directory: bool) -> io::Result<UnixListener> {
    let (directory, name) = split(path)?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    // The file gets no more than the mode that the socket has when it is bound.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    let temporary = format!(".{}.{}", name.to_string_lossy(), std::process::id());
    remove(&directory, OsStr::new(&temporary))?;
    let address = format!("/proc/self/fd/{}/{temporary}", directory.as_raw_fd());
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(address)?)?;
    let result = (|| {
        set_rights(&directory, &temporary, mode, as_directory)?;
        rustix::net::listen(&socket, BACKLOG)?;
        rustix::fs::renameat(&directory, &temporary, &directory, name)?;
        Ok(())
    })();
    if let Err(error) = result {
        let _ = remove(&directory, OsStr::new(&temporary));
        return Err(error);
    }
    Ok(UnixListener::from(socket))
}

/// Remove the socket at `path` if it is there and is a socket.
///
/// # Errors
/// The operating system's; that it or its directory is not there is none.
pub fn unlink(path: &Path) -> io::Result<()> {
    match split(path) {
        Ok((directory, name)) => remove(&directory, name),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn split(path: &Path) -> io::Result<(File, &OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "no name of a file in a directory",
        ));
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok((
        File::from(rustix::fs::open(parent, flags, Mode::empty())?),
        name,
    ))
}

fn remove(directory: &File, name: &OsStr) -> io::Result<()> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(status) if FileType::from_raw_mode(status.st_mode) == FileType::Socket => {}
        Ok(_) => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "something that is no socket has this name",
            ))
        }
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Give the fresh socket its mode, whatever the umask is, and perhaps the owner and the group of its directory. Looks at what
/// it changes: the directory's owner could have put something else in its place.
fn set_rights(directory: &File, name: &str, mode: u32, as_directory: bool) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(directory, name, flags, Mode::empty())?);
    let status = rustix::fs::fstat(&file)?;
    let is_ours = FileType::from_raw_mode(status.st_mode) == FileType::Socket
        && status.st_uid == rustix::process::geteuid().as_raw()
        && status.st_nlink == 1;
    if !is_ours {
        return Err(io::Error::other(
            "the socket was replaced while it was made",
        ));
    }
    // A descriptor without rights to the content can only be changed through its name in /proc.
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::chmod(itself, Mode::from_raw_mode(mode))?;
    let owner = directory.metadata()?;
    if !as_directory || (owner.uid(), owner.gid()) == (status.st_uid, status.st_gid) {
        return Ok(());
    }
    rustix::fs::chownat(
        &file,
        "",
        Some(Uid::from_raw(owner.uid())),
        Some(Gid::from_raw(owner.gid())),
        AtFlags::EMPTY_PATH,
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_second_listener_takes_the_place_of_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let first = listen(&path, 0o660, true).unwrap();
        let second = listen(&path, 0o660, true).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        assert!(second.accept().is_ok());
        assert_eq!(
            first.accept().unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o660
        );
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn long_paths_work() {
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("d".repeat(120));
        std::fs::create_dir(&deep).unwrap();
        let path = deep.join("disk.sock");
        listen(&path, 0o600, false).unwrap();
        assert!(path.exists());
        unlink(&path).unwrap();
        assert!(!path.exists());
        unlink(&path).unwrap();
    }

    #[test]
    fn what_is_no_socket_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("precious");
        std::fs::write(&path, "x").unwrap();
        assert!(unlink(&path).is_err());
        assert!(path.exists());
    }
}
