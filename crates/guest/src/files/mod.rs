//! Placeholder of the files room: it serves nothing until the filesystem service and `/files` replace it.
//!
//! What is to come here: `filesystem.Filesystem` built with [`crate::rpc::Service`], and `GET|POST /files` and
//! `POST /files/compose` as plain axum routes that fail with [`crate::agent::error::HttpError`]. `GET|POST /files` are
//! exempt from the token middleware and check token or signature by themselves (`AgentState::access_token`,
//! `AgentState::token_matches`); everything else is checked before it arrives here.

use std::sync::Arc;

use axum::Router;

use crate::agent::state::AgentState;

/// All routes of this room. `agent::server` merges them with the others.
pub fn router(_state: Arc<AgentState>) -> Router {
    Router::new()
}
