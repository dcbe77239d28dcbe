//! The daemon's log, on standard error.
//!
//! A reader that has gone away or does not read must never stop the daemon: a line that does not fit is dropped.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

use rustix::event::{poll, PollFd, PollFlags, Timespec};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A pipe takes this much at once when it is writable at all.
const LINE: usize = 4096;

/// Standard error that never blocks and never fails.
struct Output;

impl Write for Output {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let error = io::stderr();
        let mut descriptors = [PollFd::from_borrowed_fd(error.as_fd(), PollFlags::OUT)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        if poll(&mut descriptors, Some(&now)).is_ok() && descriptors[0].revents() == PollFlags::OUT
        {
            // Nobody can be told that the log is gone.
            let _ = rustix::io::write(error.as_fd(), &line[..line.len().min(LINE)]);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Log from now on, also what panics.
pub fn start() {
    tracing_subscriber::fmt()
        .with_writer(|| Output)
        .with_ansi(false)
        .with_target(false)
        .log_internal_errors(false)
        .init();
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
}
