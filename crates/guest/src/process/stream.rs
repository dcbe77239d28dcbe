//! Our ends of pipes and terminals: read in bounded pieces, written whole, without a thread and without a buffer that
//! idles.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
};

use bytes::Bytes;
use nix::{
    fcntl::{fcntl, FcntlArg, OFlag},
    unistd::{pipe2, read, write},
};
use tokio::io::{unix::AsyncFd, Interest};

/// The largest piece that is read at once.
pub const MAX_CHUNK: usize = 32 << 10;

/// A descriptor that never blocks.
pub struct Stream(AsyncFd<OwnedFd>);

impl Stream {
    /// Takes over `fd`. Needs a tokio context.
    pub fn new(fd: OwnedFd, interest: Interest) -> io::Result<Self> {
        // The flag is of our end only: the child's end of a pipe or terminal is another open file.
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        // SAFETY: an owned descriptor stays open, and the same one, until it is dropped with its registration.
        let registered = unsafe { AsyncFd::register_with_interest(fd, interest)? };
        Ok(Self(registered))
    }

    /// A pipe from a child to us, and the child's end.
    pub fn from_child() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = pipe2(OFlag::O_CLOEXEC)?;
        Ok((Self::new(ours, Interest::READABLE)?, theirs))
    }

    /// A pipe from us to a child, and the child's end.
    pub fn to_child() -> io::Result<(Self, OwnedFd)> {
        let (theirs, ours) = pipe2(OFlag::O_CLOEXEC)?;
        Ok((Self::new(ours, Interest::WRITABLE)?, theirs))
    }

    /// The next piece, at most `limit` (and [`MAX_CHUNK`]) bytes; empty at the end.
    pub async fn read_chunk(&self, limit: usize) -> io::Result<Bytes> {
        self.0
            .async_io(Interest::READABLE, |fd| read_now(fd, limit))
            .await
    }

    /// Writes all of `bytes`; waits while the other side does not read.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self
                .0
                .async_io(Interest::WRITABLE, |fd| Ok(write(fd, bytes)?))
                .await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }
}

/// The buffer is on the stack of this call only, so a thousand idle processes have none.
fn read_now(fd: &OwnedFd, limit: usize) -> io::Result<Bytes> {
    let mut buffer = [0; MAX_CHUNK];
    let len = read(fd, &mut buffer[..limit.min(MAX_CHUNK)])?;
    Ok(Bytes::copy_from_slice(&buffer[..len]))
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
