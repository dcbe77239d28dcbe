//! Files of the guest for clients: the RPC service `filesystem.Filesystem` and the HTTP routes under `/files`.
//!
//! Everything here acts as root, whoever asks; users decide where relative paths start and who owns what is made.

mod blocking;
mod create;
mod entry;
mod failure;
mod list;
mod metadata;
mod operations;
mod owners;
mod pseudo;
mod remove;
mod service;
mod signature;
mod transfer;
mod watch;
mod xattr;

use std::{io, sync::Arc};

use axum::Router;

use crate::agent::state::AgentState;

/// All routes of this room. `agent::server` merges them with the others.
pub fn router(state: Arc<AgentState>) -> Router {
    service::router(Arc::clone(&state)).merge(transfer::router(state))
}

/// `prefix` and 24 hexadecimal digits nobody can guess.
fn random_name(prefix: &str) -> io::Result<String> {
    let mut bytes = [0u8; 12];
    // SAFETY: the buffer is valid for the length given with it.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if usize::try_from(got) != Ok(bytes.len()) {
        return Err(io::Error::last_os_error());
    }
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{prefix}{digits}"))
}
