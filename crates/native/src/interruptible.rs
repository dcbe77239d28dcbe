//! Runs the work of a call on a thread without the interpreter lock, and ends it when Python has a signal to handle.
//!
//! Without this, Ctrl-C during a copy of many gigabytes would wait for its end.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{sync_channel, RecvTimeoutError};
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;

use crate::failure::{Failure, Outcome};

/// How often the interpreter is asked for signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Tells work in progress that nobody wants its result any more.
#[derive(Default)]
pub struct Cancel(AtomicBool);

impl Cancel {
    fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// An error once the call is to end; asked for between pieces of work.
    pub fn check(&self) -> io::Result<()> {
        if self.0.load(Ordering::Relaxed) {
            return Err(io::Error::other("interrupted"));
        }
        Ok(())
    }
}

/// Ends the calls that it was given to, from another thread.
#[pyclass(frozen, module = "agentenv._native")]
#[derive(Default)]
pub struct Cancellation(Arc<Cancel>);

#[pymethods]
impl Cancellation {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn cancel(&self) {
        self.0.request();
    }
}

/// Do the work; what it took is released before this returns, also after an interruption.
pub fn run<T, W>(py: Python<'_>, work: W) -> PyResult<T>
where
    T: Send,
    W: FnOnce(&Arc<Cancel>) -> Outcome<T> + Send,
{
    run_until(py, None, work)
}

/// Like [`run`], and end also when the cancellation says so.
pub fn run_until<T, W>(py: Python<'_>, until: Option<&Cancellation>, work: W) -> PyResult<T>
where
    T: Send,
    W: FnOnce(&Arc<Cancel>) -> Outcome<T> + Send,
{
    let cancel = until.map_or_else(Arc::default, |until| Arc::clone(&until.0));
    let (result, interruption) = py.detach(|| {
        std::thread::scope(|scope| {
            // Nothing is sent: the end of the thread closes the channel.
            let (alive, ended) = sync_channel::<()>(0);
            let cancel = &cancel;
            let worker = scope.spawn(move || {
                let _alive = alive;
                work(cancel)
            });
            let mut interruption = None;
            while matches!(
                ended.recv_timeout(SIGNAL_INTERVAL),
                Err(RecvTimeoutError::Timeout)
            ) {
                if let Err(error) = Python::attach(|py| py.check_signals()) {
                    cancel.request();
                    interruption = Some(error);
                }
            }
            (worker.join(), interruption)
        })
    });
    if let Some(error) = interruption {
        return Err(error);
    }
    match result {
        Ok(Err(_)) if cancel.check().is_err() => Err(Failure::cancelled().raise(py)),
        Ok(outcome) => outcome.map_err(|failure| failure.raise(py)),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
