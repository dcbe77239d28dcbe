//! What can go wrong with a layer, told apart so that callers can answer rightly: bad bytes, bad use, or the disk.

/// The error of every call of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes are not what the format says: damaged, truncated, or hostile. Names the part and the value.
    #[error("not a valid layer: {0}")]
    Format(String),
    /// Valid, but of a kind that this implementation does not read (dictionaries, turboOCI, compressed tables).
    #[error("not supported: {0}")]
    Unsupported(String),
    /// The file is well-formed but exceeds a limit (records, layers, sizes).
    #[error("limit exceeded: {0}")]
    Limit(String),
    /// The caller asked for what cannot be: unaligned, out of range, wrong state (sealed, read-only).
    #[error("invalid request: {0}")]
    Invalid(String),
    /// The bytes below failed. `ENOSPC` is in here, see [`Error::is_out_of_space`].
    #[error("I/O error: {0}")]
    Io(#[from] std::io::Error),
}

/// Short for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the file system had no room (`ENOSPC`, `EDQUOT`).
    #[must_use]
    pub fn is_out_of_space(&self) -> bool {
        matches!(self, Self::Io(error) if matches!(
            error.kind(),
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded
        ))
    }
}
