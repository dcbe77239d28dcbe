//! Extended attributes: the thin, safe layer over the system calls. It knows nothing about metadata.

use std::{
    ffi::{CStr, CString},
    io,
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    path::Path,
};

/// How often a list or value that grew between two calls is asked for again.
const GROWTH_RETRIES: usize = 8;

/// The names of the attributes of `path`, following symlinks.
pub fn list(path: &Path) -> io::Result<Vec<CString>> {
    let path = c_path(path)?;
    // SAFETY: the path is NUL-terminated and the buffer is valid for the length given with it.
    let raw = read_growing(|buf, len| unsafe { libc::listxattr(path.as_ptr(), buf.cast(), len) })?;
    Ok(split_names(&raw))
}

/// The names of the attributes of an open file.
pub fn list_fd(file: &impl AsRawFd) -> io::Result<Vec<CString>> {
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open while `file` is borrowed and the buffer is valid for its length.
    let raw = read_growing(|buf, len| unsafe { libc::flistxattr(fd, buf.cast(), len) })?;
    Ok(split_names(&raw))
}

/// The value of an attribute of `path`, following symlinks.
pub fn get(path: &Path, name: &CStr) -> io::Result<Vec<u8>> {
    let path = c_path(path)?;
    // SAFETY: both strings are NUL-terminated and the buffer is valid for its length.
    read_growing(|buf, len| unsafe {
        libc::getxattr(path.as_ptr(), name.as_ptr(), buf.cast(), len)
    })
}

/// The value of an attribute of an open file.
pub fn get_fd(file: &impl AsRawFd, name: &CStr) -> io::Result<Vec<u8>> {
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open while `file` is borrowed, the name is NUL-terminated, the buffer has its length.
    read_growing(|buf, len| unsafe { libc::fgetxattr(fd, name.as_ptr(), buf.cast(), len) })
}

/// Sets an attribute of an open file.
pub fn set_fd(file: &impl AsRawFd, name: &CStr, value: &[u8]) -> io::Result<()> {
    // SAFETY: the descriptor is open while `file` is borrowed, and the value is valid for its length.
    let rc = unsafe {
        libc::fsetxattr(
            file.as_raw_fd(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    check(rc)
}

/// Removes an attribute of an open file.
pub fn remove_fd(file: &impl AsRawFd, name: &CStr) -> io::Result<()> {
    // SAFETY: the descriptor is open while `file` is borrowed and the name is NUL-terminated.
    check(unsafe { libc::fremovexattr(file.as_raw_fd(), name.as_ptr()) })
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn check(rc: libc::c_int) -> io::Result<()> {
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Asks for the length, then for the content; again if it grew in between.
fn read_growing(call: impl Fn(*mut u8, usize) -> isize) -> io::Result<Vec<u8>> {
    for _ in 0..GROWTH_RETRIES {
        let needed = usize::try_from(call(std::ptr::null_mut(), 0))
            .map_err(|_| io::Error::last_os_error())?;
        if needed == 0 {
            return Ok(Vec::new());
        }
        let mut buf = vec![0u8; needed];
        match usize::try_from(call(buf.as_mut_ptr(), buf.len())) {
            Ok(got) => {
                buf.truncate(got);
                return Ok(buf);
            }
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.raw_os_error() != Some(libc::ERANGE) {
                    return Err(error);
                }
            }
        }
    }
    Err(io::Error::from_raw_os_error(libc::ERANGE))
}

fn split_names(raw: &[u8]) -> Vec<CString> {
    raw.split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .filter_map(|name| CString::new(name).ok())
        .collect()
}
