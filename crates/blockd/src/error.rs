//! The errors of the daemon: one per code of the protocol (docs/blockd.md), with a message that says what failed.
//!
//! Guests never see these: what a read or write of a device fails with is an [`std::io::Error`].

use std::fmt::Display;
use std::io;

/// What a request of the protocol failed with.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// Not JSON, unknown method or parameter, value out of range.
    #[error("{0}")]
    BadRequest(String),
    /// No such device, export or file.
    #[error("{0}")]
    NotFound(String),
    /// The device exists with other parts, is busy, has no upper, or is read-only.
    #[error("{0}")]
    Conflict(String),
    /// A layer or upper is damaged, truncated, of an unsupported kind, or beyond a limit.
    #[error("{0}")]
    BadLayer(String),
    /// The file system is full.
    #[error("{0}")]
    NoSpace(String),
    /// The host lacks what was asked for.
    #[error("{0}")]
    Unsupported(String),
    /// Anything else that the operating system refused.
    #[error("{0}")]
    Io(String),
    /// A defect of the daemon.
    #[error("{0}")]
    Internal(String),
}

/// Short for results of the daemon.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The code that goes over the wire.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::BadRequest(_) => "bad_request",
            Self::NotFound(_) => "not_found",
            Self::Conflict(_) => "conflict",
            Self::BadLayer(_) => "bad_layer",
            Self::NoSpace(_) => "no_space",
            Self::Unsupported(_) => "unsupported",
            Self::Io(_) => "io",
            Self::Internal(_) => "internal",
        }
    }

    /// An operating system's refusal of `what` (for example `create /x/upper.data`).
    #[must_use]
    pub fn io(what: impl Display, error: &io::Error) -> Self {
        let message = format!("{what}: {error}");
        match error.kind() {
            io::ErrorKind::NotFound => Self::NotFound(message),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace(message),
            _ => Self::Io(message),
        }
    }

    /// What the layer library said about `what` (a path, a device).
    #[must_use]
    pub fn layer(what: impl Display, error: overlaybd::Error) -> Self {
        match error {
            overlaybd::Error::Io(error) => Self::io(what, &error),
            overlaybd::Error::Invalid(_) => Self::Conflict(format!("{what}: {error}")),
            _ => Self::BadLayer(format!("{what}: {error}")),
        }
    }
}
