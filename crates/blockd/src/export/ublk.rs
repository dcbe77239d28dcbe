//! The ublk export: a block device of the kernel whose requests come to this process through `io_uring`.
//!
//! Must not know of layers or the protocol.

use super::{Export, Start, Target};
use crate::error::{Error, Result};

/// Whether this host can make ublk devices; the error says what is missing.
///
/// # Errors
/// `Unsupported`.
pub fn check_host() -> Result<()> {
    Err(Error::Unsupported("this host has no ublk".into()))
}

/// A number that no ublk device has and that is not in `taken` (numbers in the daemon's own records).
///
/// # Errors
/// `Unsupported` on a host without ublk.
pub fn free_number(taken: &[u32]) -> Result<u32> {
    let _ = taken;
    check_host().map(|()| 0)
}

/// Make or take back `/dev/ublkb<number>`.
///
/// # Errors
/// `Unsupported`, `Conflict` (number taken), `Io`.
pub fn start(
    target: Target,
    number: u32,
    queues: u16,
    depth: u16,
    start: Start,
) -> Result<Box<dyn Export>> {
    let _ = (target, number, queues, depth, start);
    Err(Error::Unsupported("this host has no ublk".into()))
}
