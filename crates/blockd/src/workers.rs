//! The bounded pool of threads for whatever may wait for a disk, shared by all devices of the daemon.
//!
//! Threads are started when all others are busy and end when they had nothing to do for a while. Jobs must not wait for
//! clients: a client that stops reading would otherwise hold a thread that other devices need.

use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Stack of every thread that serves requests, bytes: thousands of connections may be open.
pub const THREAD_STACK: usize = 256 * 1024;

const IDLE_BEFORE_END: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// A handle of the pool; clones share it.
#[derive(Clone)]
pub struct Workers(Arc<Shared>);

struct Shared {
    limit: usize,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

impl Workers {
    /// A pool of at most `limit` threads; none is started before there is work.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Shared {
            limit: limit.max(1),
            state: Mutex::default(),
            work: Condvar::new(),
        }))
    }

    /// Threads that exist now.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.0.lock().threads
    }

    /// Run `job` on some thread. It runs on the caller's when none can be started and none exists.
    pub fn submit(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.0.lock();
        state.jobs.push_back(Box::new(job));
        if state.idle >= state.jobs.len() {
            drop(state);
            self.0.work.notify_one();
            return;
        }
        if state.threads >= self.0.limit {
            return;
        }
        state.threads += 1;
        drop(state);
        let shared = Arc::clone(&self.0);
        let started = std::thread::Builder::new()
            .name("worker".into())
            .stack_size(THREAD_STACK)
            .spawn(move || shared.work());
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start a worker thread");
            let mut state = self.0.lock();
            state.threads -= 1;
            let orphan = if state.threads == 0 {
                state.jobs.pop_back()
            } else {
                None
            };
            drop(state);
            if let Some(job) = orphan {
                run(job);
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                run(job);
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (guard, wait) = self
                .work
                .wait_timeout(state, IDLE_BEFORE_END)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if wait.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

/// A defect in one job must not cost the pool a thread; whoever submitted it sees to its own answer.
fn run(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!("a job panicked");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn jobs_run_side_by_side_up_to_the_limit() {
        let workers = Workers::new(4);
        let (arrived, arrivals) = mpsc::channel();
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        for _ in 0..6 {
            let arrived = arrived.clone();
            let gate = Arc::clone(&gate);
            workers.submit(move || {
                arrived.send(()).unwrap();
                let mut open = gate.0.lock().unwrap();
                while !*open {
                    open = gate.1.wait(open).unwrap();
                }
            });
        }
        for _ in 0..4 {
            arrivals.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        assert!(arrivals.recv_timeout(Duration::from_millis(50)).is_err());
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        for _ in 0..2 {
            arrivals.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        assert_eq!(workers.threads(), 4);
    }

    #[test]
    fn a_panic_does_not_end_the_thread() {
        let workers = Workers::new(1);
        workers.submit(|| panic!("on purpose"));
        let (done, finished) = mpsc::channel();
        workers.submit(move || done.send(()).unwrap());
        finished.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(workers.threads(), 1);
    }
}
