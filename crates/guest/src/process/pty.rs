//! Pseudo-terminals: made with the kernel's own calls, since the image may lack `/dev/pts` helpers.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
};

use bytes::Bytes;
use nix::{
    sys::stat::{fchmod, Mode},
    unistd::{fchown, Gid, Uid},
};
use tokio::io::Interest;

use super::stream::Stream;
use crate::agent::users::{self, User};

/// Rows and columns of a terminal whose client names none.
const DEFAULT_SIZE: Size = Size { rows: 24, cols: 80 };
/// The owner reads and writes, group `tty` writes, as `grantpt` has it.
const TERMINAL_MODE: u32 = 0o620;

/// The size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub rows: u16,
    pub cols: u16,
}

impl Size {
    /// Zero means the default for that dimension; `None` for what no terminal can have.
    pub fn new(cols: u32, rows: u32) -> Option<Self> {
        let pick = |value: u32, default: u16| match value {
            0 => Some(default),
            _ => u16::try_from(value).ok(),
        };
        Some(Self {
            rows: pick(rows, DEFAULT_SIZE.rows)?,
            cols: pick(cols, DEFAULT_SIZE.cols)?,
        })
    }
}

/// Our end of a terminal.
pub struct Pty {
    master: Stream,
}

impl Pty {
    /// Makes a terminal that belongs to `user`, and returns the end for the child, too. Needs a tokio context.
    pub fn open(size: Option<Size>, user: &User) -> io::Result<(Self, OwnedFd)> {
        let master: OwnedFd = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOCTTY)
            .open("/dev/ptmx")?
            .into();
        let unlocked: libc::c_int = 0;
        // SAFETY: TIOCSPTLCK reads an int; TIOCGPTPEER takes open flags and returns a new descriptor.
        let slave = unsafe {
            if libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) == -1 {
                return Err(io::Error::last_os_error());
            }
            let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
            match libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) {
                -1 => return Err(io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        let group = users::group_id("tty").unwrap_or(user.gid);
        fchown(
            &slave,
            Some(Uid::from_raw(user.uid)),
            Some(Gid::from_raw(group)),
        )?;
        fchmod(&slave, Mode::from_bits_truncate(TERMINAL_MODE))?;
        let pty = Self {
            master: Stream::new(master, Interest::READABLE | Interest::WRITABLE)?,
        };
        pty.resize(size.unwrap_or(DEFAULT_SIZE))?;
        Ok((pty, slave))
    }

    /// Sets the size; the kernel tells the foreground processes.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        let size = libc::winsize {
            ws_row: size.rows,
            ws_col: size.cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: TIOCSWINSZ reads a winsize.
        match unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    /// The next output, at most `limit` bytes; empty when the last process has left the terminal.
    pub async fn read_chunk(&self, limit: usize) -> io::Result<Bytes> {
        match self.master.read_chunk(limit).await {
            // How Linux reports a terminal that nobody has open any more.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(Bytes::new()),
            other => other,
        }
    }

    /// Types `bytes`; waits while the terminal's input is full.
    pub async fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        self.master.write_all(bytes).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_is_the_default_and_giants_are_refused() {
        assert_eq!(Size::new(0, 0), Some(DEFAULT_SIZE));
        assert_eq!(
            Size::new(120, 0),
            Some(Size {
                rows: 24,
                cols: 120
            })
        );
        assert_eq!(Size::new(65_536, 1), None);
    }
}
