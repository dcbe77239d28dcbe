//! How errors about files become HTTP answers.

use std::{io, path::Path};

use http::StatusCode;

use crate::agent::error::HttpError;

pub fn bad_request(message: impl Into<String>) -> HttpError {
    HttpError::new(StatusCode::BAD_REQUEST, message)
}

pub fn unauthorized(message: impl Into<String>) -> HttpError {
    HttpError::new(StatusCode::UNAUTHORIZED, message)
}

pub fn missing(path: &Path) -> HttpError {
    HttpError::new(
        StatusCode::NOT_FOUND,
        format!("path '{}' does not exist", path.display()),
    )
}

pub fn is_directory(path: &Path) -> HttpError {
    bad_request(format!("path '{}' is a directory", path.display()))
}

pub fn not_regular(path: &Path) -> HttpError {
    bad_request(format!("path '{}' is not a regular file", path.display()))
}

/// The answer for a system error met while doing `doing` (a verb) with `path`.
pub fn from_io(doing: &str, path: &Path, error: &io::Error) -> HttpError {
    let status = match error.raw_os_error() {
        Some(libc::ENOENT) => return missing(path),
        Some(libc::EISDIR) => return is_directory(path),
        _ if is_full(error) => StatusCode::INSUFFICIENT_STORAGE,
        Some(libc::ENOTDIR | libc::ELOOP | libc::ENAMETOOLONG | libc::EINVAL | libc::ENXIO) => {
            StatusCode::BAD_REQUEST
        }
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => StatusCode::FORBIDDEN,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    HttpError::new(
        status,
        format!("cannot {doing} '{}': {error}", path.display()),
    )
}

/// Whether the disk, or the user's share of it, is full.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// A failure of the agent itself.
pub fn internal(error: impl std::fmt::Display) -> HttpError {
    HttpError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}
