//! Runs what waits for the disk on threads made for waiting.

use crate::rpc::{Code, RpcError, RpcResult};

/// Runs `work` off the threads that serve connections. If the caller goes away the work still finishes.
///
/// # Errors
/// `internal` if it panicked, `unavailable` if the agent is about to end.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> RpcResult<T> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        let code = if error.is_cancelled() {
            Code::Unavailable
        } else {
            Code::Internal
        };
        RpcError::new(code, format!("the file operation failed: {error}"))
    })
}
