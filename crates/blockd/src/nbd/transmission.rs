//! The transmission phase: requests are read in batches and answered, in any order.

use std::io;
use std::os::unix::net::UnixStream;

use super::Agreement;
use crate::export::Target;

/// Serve requests until the client disconnects or the socket is shut down from elsewhere (keep a clone for that).
/// Returns when no request is in flight any more. Clients that break the protocol are disconnected: an error says why.
///
/// # Errors
/// The stream's, or `InvalidData` for a client that breaks the protocol.
pub fn serve_transmission(
    stream: UnixStream,
    target: &Target,
    agreement: Agreement,
) -> io::Result<()> {
    let _ = (stream, target, agreement);
    Ok(())
}
