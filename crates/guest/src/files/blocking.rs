//! Runs what waits for the disk on threads made for waiting, and tells it when nobody waits for its result any more.

use std::sync::{
    atomic::{AtomicBool, Ordering},
    Arc,
};

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

/// Whether work should stop, for the thread that does it.
#[derive(Clone, Debug, Default)]
pub struct Cancelled(Arc<AtomicBool>);

impl Cancelled {
    /// Fails once nobody wants the result.
    ///
    /// # Errors
    /// `canceled`.
    pub fn check(&self) -> RpcResult<()> {
        if self.0.load(Ordering::Relaxed) {
            return Err(RpcError::new(
                Code::Canceled,
                "the client does not wait for the answer any more",
            ));
        }
        Ok(())
    }
}

/// Held by who wants a result. Dropping it cancels the work, which is how a future that is dropped (its client left, its
/// deadline is over) stops a thread that it cannot reach.
#[derive(Debug, Default)]
pub struct CancelOnDrop(Cancelled);

impl CancelOnDrop {
    /// What the work looks at.
    pub fn flag(&self) -> Cancelled {
        self.0.clone()
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0 .0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dropped_call_stops_its_work() {
        let (started, has_started) = tokio::sync::oneshot::channel();
        let (stopped, has_stopped) = tokio::sync::oneshot::channel();
        let call = tokio::spawn(async {
            let wanted = CancelOnDrop::default();
            let cancelled = wanted.flag();
            blocking(move || {
                started.send(()).unwrap();
                let reason = loop {
                    if let Err(error) = cancelled.check() {
                        break error.code;
                    }
                    std::thread::yield_now();
                };
                stopped.send(reason).unwrap();
            })
            .await
        });
        has_started.await.unwrap();
        call.abort();
        assert_eq!(has_stopped.await.unwrap(), Code::Canceled);
    }
}
