//! The handshake: fixed newstyle negotiation.

use std::io;
use std::os::unix::net::UnixStream;

use super::Agreement;
use crate::export::Target;

/// Agree with a fresh client; `None` when it only asked or went away.
///
/// # Errors
/// The stream's, or `InvalidData` for a client that breaks the protocol.
pub fn negotiate(stream: &UnixStream, target: &Target) -> io::Result<Option<Agreement>> {
    let _ = (stream, target);
    Ok(None)
}
