//! The protocol of docs/blockd.md: messages, and the socket that they come over.

mod message;
mod server;

pub use message::{dispatch, Outcome, Request};
pub use server::Server;

/// Version of the protocol.
pub const VERSION: u32 = 1;
/// Longest line, bytes.
pub const LINE_LIMIT: usize = 1 << 20;
