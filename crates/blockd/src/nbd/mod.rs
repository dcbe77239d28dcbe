//! The NBD protocol, server side, over a connected stream: negotiation and transmission.
//!
//! Must not listen, open devices or know of layers: it serves a [`crate::export::Target`].

mod answer;
mod negotiation;
mod outbox;
mod receiver;
mod replies;
mod request;
mod transmission;
pub mod wire;

pub use negotiation::negotiate;
pub use transmission::serve_transmission;

/// What client and server agreed on before the first request. The default suits the kernel's client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Agreement {
    /// Reads are answered by structured replies.
    pub structured_replies: bool,
    /// The client may ask for block status of `base:allocation`.
    pub allocation: bool,
}
