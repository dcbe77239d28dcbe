//! The kernel NBD export: `/dev/nbd<number>`, whose sockets are pairs that this process serves.
//!
//! Must not know of layers or the protocol.

use super::{Export, Start, Target};
use crate::error::{Error, Result};

/// Whether this host can make NBD devices; the error says what is missing.
///
/// # Errors
/// `Unsupported`.
pub fn check_host() -> Result<()> {
    Err(Error::Unsupported("this host has no kernel NBD".into()))
}

/// A number that is not connected and not in `taken` (numbers in the daemon's own records).
///
/// # Errors
/// `Unsupported` on a host without the `nbd` module.
pub fn free_number(taken: &[u32]) -> Result<u32> {
    let _ = taken;
    check_host().map(|()| 0)
}

/// Connect or reconnect `/dev/nbd<number>` with `connections` socket pairs, each served by
/// [`crate::nbd::serve_transmission`] in a thread of its own.
///
/// # Errors
/// `Unsupported`, `Conflict` (number taken), `Io`.
pub fn start(
    target: Target,
    number: u32,
    connections: u16,
    start: Start,
) -> Result<Box<dyn Export>> {
    let _ = (target, number, connections, start);
    Err(Error::Unsupported("this host has no kernel NBD".into()))
}
