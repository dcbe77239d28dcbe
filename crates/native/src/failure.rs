//! What a call of the module raises: one exception class with a kind that callers branch on, and a message that names
//! the file. No other error leaves this crate.

use std::io;
use std::path::Path;

use pyo3::create_exception;
use pyo3::exceptions::{PyBrokenPipeError, PyException};
use pyo3::prelude::*;

create_exception!(
    _native,
    LayerError,
    PyException,
    "What failed, for which file; `kind` is one word for programs, `message` the text for people."
);

/// How a call failed.
#[derive(Debug)]
pub enum Failure {
    /// A `LayerError` of this kind, with this message.
    Layer { kind: &'static str, message: String },
    /// The reader of `cat`'s output has gone.
    BrokenPipe,
}

/// Result of everything in this crate.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// The arguments of the call are wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::Layer {
            kind: "invalid",
            message: message.into(),
        }
    }

    /// The caller wanted the end of it.
    pub fn cancelled() -> Self {
        Self::Layer {
            kind: "cancelled",
            message: "cancelled".to_owned(),
        }
    }

    /// The output exists, and was not to be replaced.
    pub fn exists(path: &Path) -> Self {
        Self::Layer {
            kind: "exists",
            message: format!("{} exists already", path.display()),
        }
    }

    /// The exception for Python.
    pub fn raise(self, py: Python<'_>) -> PyErr {
        let (kind, message) = match self {
            Self::BrokenPipe => return PyBrokenPipeError::new_err("the reader has closed its end"),
            Self::Layer { kind, message } => (kind, message),
        };
        let error = LayerError::new_err(message.clone());
        let value = error.value(py);
        match value
            .setattr("kind", kind)
            .and_then(|()| value.setattr("message", message))
        {
            Ok(()) => error,
            Err(other) => other,
        }
    }
}

fn kind_of(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => "not_found",
        io::ErrorKind::AlreadyExists => "exists",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "no_space",
        // A layer that ends before what it promises, or a block whose checksum is another.
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => "format",
        _ => "io",
    }
}

/// Says which file an error is about.
pub trait About<T> {
    /// Turn the error into a [`Failure`] that names `path`.
    fn about(self, path: &Path) -> Outcome<T>;
}

impl<T> About<T> for io::Result<T> {
    fn about(self, path: &Path) -> Outcome<T> {
        self.map_err(|error| Failure::Layer {
            kind: kind_of(&error),
            message: format!("{}: {error}", path.display()),
        })
    }
}

impl<T> About<T> for overlaybd::Result<T> {
    fn about(self, path: &Path) -> Outcome<T> {
        use overlaybd::Error;
        self.map_err(|error| {
            let kind = match &error {
                Error::Format(_) => "format",
                Error::Unsupported(_) => "unsupported",
                Error::Limit(_) => "limit",
                Error::Invalid(_) => "invalid",
                Error::Io(error) => kind_of(error),
            };
            Failure::Layer {
                kind,
                message: format!("{}: {error}", path.display()),
            }
        })
    }
}
