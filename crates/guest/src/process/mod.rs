//! Commands in the guest: `process.Process`.

use std::sync::Arc;

use axum::Router;

use crate::agent::state::AgentState;

/// The service's routes.
pub fn router(_state: Arc<AgentState>) -> Router {
    Router::new()
}
