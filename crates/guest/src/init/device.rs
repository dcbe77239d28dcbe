//! Kernel device events (uevents), so that init waits for a device without polling for it.
//!
//! The event of a disk comes after the disk can be opened, which its node in `/dev` alone does not promise.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::Instant,
};

use anyhow::Result;
use nix::{
    errno::Errno,
    poll::{poll, PollFd, PollFlags, PollTimeout},
    sys::socket::{
        bind, recv, socket, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType,
    },
};

/// A subscription to the kernel's events. Events from before `open` are not seen: look first, then wait.
pub struct Events {
    socket: OwnedFd,
}

impl Events {
    pub fn open() -> Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkKObjectUEvent,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 1))?;
        Ok(Self { socket })
    }

    /// Waits for the next event of a subsystem (`block`, `net`). False when the deadline passed first.
    pub fn wait(&mut self, subsystem: &str, deadline: Instant) -> io::Result<bool> {
        let mut buffer = [0u8; 8192];
        loop {
            match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(length) if is_of_subsystem(&buffer[..length], subsystem) => return Ok(true),
                // The queue overflowed: an event may be lost, so the caller has to look again.
                Err(Errno::ENOBUFS) => return Ok(true),
                Ok(_) | Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => {}
                Err(error) => return Err(error.into()),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(
                &mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)],
                timeout,
            ) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// An event is `action@path` and `KEY=value` words, each ended by NUL.
fn is_of_subsystem(event: &[u8], subsystem: &str) -> bool {
    event
        .split(|byte| *byte == 0)
        .any(|word| word.strip_prefix(b"SUBSYSTEM=") == Some(subsystem.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_told_apart_by_subsystem() {
        let event = b"add@/devices/virtio0/block/vda\0ACTION=add\0SUBSYSTEM=block\0DEVNAME=vda\0";
        assert!(is_of_subsystem(event, "block"));
        assert!(!is_of_subsystem(event, "bloc"));
        assert!(!is_of_subsystem(event, "net"));
        assert!(!is_of_subsystem(b"", "net"));
    }
}
