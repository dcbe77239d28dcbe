//! Replies on their way to a client, from several threads over one stream.
//!
//! The connection's own thread may wait for the client; a worker never does: what it cannot send at once it leaves here and
//! wakes the connection's thread. What waits here is bounded by the budget that a job takes before it begins.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::event::{eventfd, EventfdFlags};
use rustix::net::{sendmsg, SendAncillaryBuffer, SendFlags};

/// Jobs of one connection that may be with the workers at once.
const JOBS: usize = 32;
/// Bytes that the jobs of one connection may hold, from their begin until the client has them.
const JOB_BYTES: usize = 64 << 20;
/// Slices of one system call; the kernel takes 1024.
const SLICES: usize = 64;

/// The sending side of a connection.
pub(super) struct Outbox {
    stream: Arc<UnixStream>,
    state: Mutex<State>,
    changed: Condvar,
    wake: OnceLock<OwnedFd>,
}

#[derive(Default)]
struct State {
    replies: VecDeque<Reply>,
    /// Bytes of the first reply that the client has.
    sent: usize,
    /// Somebody is in the middle of sending.
    sending: bool,
    /// The client has no room; the connection's thread must send.
    stalled: bool,
    /// The stream is broken: replies are dropped.
    broken: bool,
    jobs: usize,
    bytes: usize,
}

struct Reply {
    bytes: Vec<u8>,
    /// What its job took of the budget.
    budget: usize,
}

impl Outbox {
    pub fn new(stream: Arc<UnixStream>) -> Self {
        Self {
            stream,
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: OnceLock::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any job or reply of a job is under way.
    pub fn is_busy(&self) -> bool {
        self.lock().jobs > 0
    }

    /// Readable when the connection's thread has to look after this; `None` before the first job.
    pub fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.wake.get().map(AsFd::as_fd)
    }

    /// Take `bytes` of the budget for a job, waiting for others to end if need be. Sends what workers had to leave here.
    pub fn begin_job(&self, bytes: usize) -> io::Result<()> {
        if self.wake.get().is_none() {
            let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            // Only the connection's thread begins jobs, so nobody else sets it.
            let _ = self.wake.set(descriptor);
        }
        let mut state = self.lock();
        while state.jobs > 0 && (state.jobs >= JOBS || state.bytes + bytes > JOB_BYTES) {
            state = self.wait_or_send(state);
        }
        state.jobs += 1;
        state.bytes += bytes;
        Ok(())
    }

    /// The answer of a job that took `budget`. Never waits for the client.
    pub fn finish_job(&self, reply: Vec<u8>, budget: usize) {
        let mut state = self.lock();
        state.replies.push_back(Reply {
            bytes: reply,
            budget,
        });
        if !state.sending {
            state = self.send_queued(state, SendFlags::DONTWAIT);
        }
        let wake = state.stalled;
        drop(state);
        self.changed.notify_all();
        if wake {
            self.wake();
        }
    }

    /// Send `bytes` after whatever is queued, waiting for the client. Only for the connection's thread.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.acquire();
        state.sending = true;
        if !state.replies.is_empty() {
            state = self.drain(state, SendFlags::empty());
        }
        let broken = state.broken;
        drop(state);
        let result = if broken {
            Err(io::ErrorKind::BrokenPipe.into())
        } else {
            self.send_all(bytes)
        };
        let mut state = self.lock();
        state.broken |= result.is_err();
        state = self.drain(state, SendFlags::empty());
        state.sending = false;
        drop(state);
        self.changed.notify_all();
        result
    }

    /// Send what workers had to leave here, waiting for the client. Only for the connection's thread.
    pub fn send_left(&self) -> io::Result<()> {
        if let Some(descriptor) = self.wake.get() {
            // The counter goes back to zero; that there was nothing is no error.
            let _ = rustix::io::read(descriptor, &mut [0; 8]);
        }
        let state = self.acquire();
        let state = self.send_queued(state, SendFlags::empty());
        if state.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    }

    /// Return when no job is under way. Replies that the client does not take any more are dropped.
    pub fn finish(&self) {
        let mut state = self.lock();
        while state.jobs > 0 {
            state = self.wait_or_send(state);
        }
    }

    /// The state at a moment when nobody sends. A worker that sends does not wait, so this is soon.
    fn acquire(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while state.sending {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// One step of waiting for jobs: send what is left over, or sleep until a job ends.
    fn wait_or_send<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if !state.sending && !state.replies.is_empty() {
            return self.send_queued(state, SendFlags::empty());
        }
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn send_queued<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        flags: SendFlags,
    ) -> MutexGuard<'a, State> {
        state.sending = true;
        state = self.drain(state, flags);
        state.sending = false;
        state
    }

    /// Send all that is queued. The caller has set `sending`. With `DONTWAIT`, until the client has no room.
    fn drain<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        flags: SendFlags,
    ) -> MutexGuard<'a, State> {
        state.stalled = false;
        while !state.replies.is_empty() {
            if state.broken {
                while let Some(reply) = state.replies.pop_front() {
                    state.jobs -= 1;
                    state.bytes -= reply.budget;
                }
                state.sent = 0;
                break;
            }
            // The replies leave the queue while they are sent, so that the lock is free meanwhile.
            let count = state.replies.len().min(SLICES);
            let batch: Vec<Reply> = state.replies.drain(..count).collect();
            let sent = std::mem::take(&mut state.sent);
            drop(state);
            let result = self.send_batch(&batch, sent, flags);
            state = self.lock();
            let mut count = match result {
                Ok(count) => count,
                Err(_) => {
                    state.broken = true;
                    0
                }
            };
            let mut left = Vec::new();
            for reply in batch {
                if left.is_empty() && count >= reply.bytes.len() {
                    count -= reply.bytes.len();
                    state.jobs -= 1;
                    state.bytes -= reply.budget;
                } else {
                    left.push(reply);
                }
            }
            if left.is_empty() {
                continue;
            }
            state.sent = count;
            for reply in left.into_iter().rev() {
                state.replies.push_front(reply);
            }
            if !state.broken && flags.contains(SendFlags::DONTWAIT) {
                state.stalled = true;
                break;
            }
        }
        state
    }

    /// Bytes of the batch that the client has afterwards, counted from the begin of its first reply.
    fn send_batch(&self, batch: &[Reply], sent: usize, flags: SendFlags) -> io::Result<usize> {
        let mut slices: Vec<IoSlice> = batch
            .iter()
            .map(|reply| IoSlice::new(&reply.bytes))
            .collect();
        let mut slices = slices.as_mut_slice();
        IoSlice::advance_slices(&mut slices, sent);
        let mut total = sent;
        while !slices.is_empty() {
            match sendmsg(
                &*self.stream,
                slices,
                &mut SendAncillaryBuffer::default(),
                flags | SendFlags::NOSIGNAL,
            ) {
                Ok(count) => {
                    total += count;
                    IoSlice::advance_slices(&mut slices, count);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) if flags.contains(SendFlags::DONTWAIT) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(total)
    }

    fn send_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::net::send(&*self.stream, bytes, SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn wake(&self) {
        if let Some(descriptor) = self.wake.get() {
            // It can only fail when the counter is full, and then the thread is awake anyway.
            let _ = rustix::io::write(descriptor, &1u64.to_ne_bytes());
        }
    }
}
