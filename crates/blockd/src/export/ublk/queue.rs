//! One hardware queue of a ublk device: takes the kernel's requests from `io_uring` and answers them.
//!
//! A thread of its own does what needs no wait for a disk; the rest goes to the workers, which leave their answers in a
//! [`Mailbox`]. Must not make or remove devices.

use std::cell::Cell;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::{opcode, types, IoUring};
use libublk::helpers::IoBuf;
use libublk::io::{with_task_io_ring, with_task_io_ring_mut, UblkDev, UblkIOCtx, UblkQueue};
use libublk::{sys, BufDesc, BufDescList, UblkError, UblkIORes, UblkUringData};
use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags};

use crate::backend::{BlockBackend, SECTOR};
use crate::export::Target;

/// What other threads have to tell a queue.
pub(super) struct Mailbox {
    wake: OwnedFd,
    mail: Mutex<Mail>,
}

#[derive(Default)]
struct Mail {
    /// Tags of requests that workers have done, with the results for the kernel.
    done: Vec<(u16, i32)>,
    detach: bool,
}

impl Mailbox {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            mail: Mutex::default(),
        })
    }

    /// End the queue; what the kernel still sends stays with the kernel.
    pub fn detach(&self) {
        self.lock().detach = true;
        self.wake();
    }

    fn post(&self, tag: u16, result: i32) {
        self.lock().done.push((tag, result));
        self.wake();
    }

    fn take(&self) -> Mail {
        // The counter goes back to zero; that there was nothing is no error.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        let mut mail = self.lock();
        Mail {
            done: std::mem::take(&mut mail.done),
            detach: mail.detach,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // It can only fail when the counter is full, and then the queue is awake anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Serve a queue until the kernel stops the device or the mailbox says `detach`. Returns when no request is in flight.
///
/// `ready` is called when the kernel may start the device.
///
/// # Errors
/// When the queue cannot be set up or its ring fails.
pub(super) fn serve(
    id: u16,
    device: &UblkDev,
    target: &Target,
    mailbox: &Arc<Mailbox>,
    ready: impl FnOnce(),
) -> Result<(), UblkError> {
    // While the kernel may still fill one of them they must not be freed, also when something here panics.
    let mut buffers = ManuallyDrop::new(device.alloc_queue_io_bufs());
    let queue = UblkQueue::new(id, device)?
        .submit_fetch_commands_unified(BufDescList::Slices(Some(&buffers)))?;
    let ring = Ring;
    let server = Server {
        queue: &queue,
        buffers: &buffers,
        target,
        mailbox,
        jobs: Cell::new(0),
        detaching: Cell::new(false),
    };
    server.watch_mailbox()?;
    ready();
    let result = server.run();
    // Workers use the buffers.
    server.wait_for_jobs();
    drop(ring);
    drop(queue);
    if let Ok(Ending::Stopped) = result {
        // SAFETY: it is done once, and the kernel has taken back every request that had a buffer.
        unsafe { ManuallyDrop::drop(&mut buffers) };
    }
    result.map(|_| ())
}

enum Ending {
    /// The kernel sends nothing any more.
    Stopped,
    /// The kernel has requests that wait for a successor.
    Detached,
}

/// Closes the thread's ring when it is dropped, so that the kernel takes back the requests that wait in it. The library
/// does not: it would wait for them when it drops the queue.
struct Ring;

impl Drop for Ring {
    fn drop(&mut self) {
        match IoUring::new(2) {
            Ok(spare) => {
                with_task_io_ring_mut(|ring| drop(std::mem::replace(ring, spare)));
            }
            Err(error) => {
                tracing::error!(%error, "a ublk queue cannot be closed");
                std::process::abort();
            }
        }
    }
}

struct Server<'a> {
    queue: &'a UblkQueue<'a>,
    buffers: &'a [IoBuf<u8>],
    target: &'a Target,
    mailbox: &'a Arc<Mailbox>,
    /// Requests that are with the workers.
    jobs: Cell<usize>,
    detaching: Cell<bool>,
}

impl Server<'_> {
    fn run(&self) -> Result<Ending, UblkError> {
        loop {
            let result = self.queue.flush_and_wake_io_tasks(
                |data, completion, _| self.completed(data, completion.result()),
                1,
            );
            match result {
                Ok(_) => {}
                Err(UblkError::QueueIsDown) => return Ok(Ending::Stopped),
                Err(UblkError::IOError(error)) if is_transient(&error) => {}
                Err(error) => return Err(error),
            }
            if self.detaching.get() && self.jobs.get() == 0 {
                // The answers that are ready; the kernel sends again what has none.
                with_task_io_ring(|ring| ring.submit())?;
                return Ok(Ending::Detached);
            }
        }
    }

    fn completed(&self, data: u64, result: i32) {
        if data & UblkUringData::Target as u64 != 0 {
            self.read_mail();
        } else if result == sys::UBLK_IO_RES_OK as i32 && !self.detaching.get() {
            // A tag is below the depth, which is a u16.
            self.begin(UblkIOCtx::user_data_to_tag(data) as u16);
        }
    }

    fn watch_mailbox(&self) -> Result<(), UblkError> {
        let descriptor = types::Fd(self.mailbox.wake.as_raw_fd());
        let entry = opcode::PollAdd::new(descriptor, u32::from(PollFlags::IN.bits()))
            .build()
            .user_data(UblkUringData::Target as u64);
        self.queue.ublk_submit_sqe_sync(entry)
    }

    fn read_mail(&self) {
        let mail = self.mailbox.take();
        for (tag, result) in mail.done {
            self.jobs.set(self.jobs.get() - 1);
            self.answer(tag, result);
        }
        self.detaching.set(mail.detach);
        if let Err(error) = self.watch_mailbox() {
            // Jobs would never be answered; a daemon that ends is better, since its successor gets the requests again.
            tracing::error!(device = %self.target.device, %error, "a ublk queue cannot watch its mailbox");
            std::process::abort();
        }
    }

    fn begin(&self, tag: u16) {
        let request = *self.queue.get_iod(tag);
        let backend = &self.target.backend;
        let offset = request.start_sector.saturating_mul(SECTOR);
        let length = u64::from(request.nr_sectors) * SECTOR;
        let durable = request.op_flags & sys::UBLK_IO_F_FUA != 0;
        let allocate = request.op_flags & sys::UBLK_IO_F_NOUNMAP != 0;
        backend.request_started();
        match request.op_flags & 0xff {
            operation @ (sys::UBLK_IO_OP_READ | sys::UBLK_IO_OP_WRITE) => {
                let Some(buffer) = Buffer::new(&self.buffers[usize::from(tag)], length) else {
                    return self.answer(tag, -libc::EINVAL);
                };
                let count = buffer.length as i32;
                if operation == sys::UBLK_IO_OP_READ {
                    match backend.try_read_at(buffer.bytes_mut(), offset) {
                        Ok(true) => self.answer(tag, count),
                        Ok(false) => self.submit(tag, count, move |backend| {
                            backend.read_at(buffer.bytes_mut(), offset)
                        }),
                        Err(error) => self.answer(tag, code_of(&error)),
                    }
                } else if durable {
                    self.submit(tag, count, move |backend| {
                        backend.write_at(buffer.bytes(), offset)?;
                        backend.flush()
                    });
                } else {
                    let result = backend.write_at(buffer.bytes(), offset);
                    self.answer(tag, result.map_or_else(|error| code_of(&error), |()| count));
                }
            }
            sys::UBLK_IO_OP_FLUSH => self.submit(tag, 0, |backend| backend.flush()),
            sys::UBLK_IO_OP_DISCARD => {
                self.submit(tag, 0, move |backend| backend.discard(offset, length));
            }
            sys::UBLK_IO_OP_WRITE_ZEROES => self.submit(tag, 0, move |backend| {
                backend.write_zeroes(offset, length, allocate)?;
                if durable {
                    backend.flush()?;
                }
                Ok(())
            }),
            _ => self.answer(tag, -libc::EOPNOTSUPP),
        }
    }

    /// Have a worker do it; `success` is what the kernel is told then.
    fn submit(
        &self,
        tag: u16,
        success: i32,
        work: impl FnOnce(&dyn BlockBackend) -> io::Result<()> + Send + 'static,
    ) {
        self.jobs.set(self.jobs.get() + 1);
        let answer = Answer {
            mailbox: Arc::clone(self.mailbox),
            tag,
            result: -libc::EIO,
        };
        let backend = Arc::clone(&self.target.backend);
        self.target.workers.submit(move || {
            let result = work(backend.as_ref());
            answer.finish(result.map_or_else(|error| code_of(&error), |()| success));
        });
    }

    fn answer(&self, tag: u16, result: i32) {
        self.target.backend.request_finished();
        let buffer = self.buffers[usize::from(tag)].as_mut_ptr();
        let answered = self.queue.complete_io_cmd_unified(
            tag,
            BufDesc::RawAddress(buffer),
            Ok(UblkIORes::Result(result)),
        );
        if let Err(error) = answered {
            tracing::error!(device = %self.target.device, tag, %error, "a ublk request cannot be answered");
        }
    }

    fn wait_for_jobs(&self) {
        while self.jobs.get() > 0 {
            let wake = PollFd::new(&self.mailbox.wake, PollFlags::IN);
            // An interrupted wait is begun again.
            let _ = poll(&mut [wake], None);
            for _ in self.mailbox.take().done {
                self.jobs.set(self.jobs.get() - 1);
                self.target.backend.request_finished();
            }
        }
    }
}

/// Tells the queue how a job ended when it is dropped, so that one that panicked is answered too.
struct Answer {
    mailbox: Arc<Mailbox>,
    tag: u16,
    result: i32,
}

impl Answer {
    fn finish(mut self, result: i32) {
        self.result = result;
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.mailbox.post(self.tag, self.result);
    }
}

/// The bytes of one request, for the thread that has it.
struct Buffer {
    start: *mut u8,
    length: usize,
}

// SAFETY: the kernel has one request per tag, and from its begin to its answer exactly one thread of ours has the buffer:
// the queue's, or the worker that the queue gave it to. `serve` keeps the memory until all workers are done.
unsafe impl Send for Buffer {}

impl Buffer {
    /// `None` for a request that is larger than what the device allows.
    fn new(buffer: &IoBuf<u8>, length: u64) -> Option<Self> {
        let length = usize::try_from(length)
            .ok()
            .filter(|length| *length <= buffer.len())?;
        Some(Self {
            start: buffer.as_mut_ptr(),
            length,
        })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: see above; `new` has checked the length. The kernel filled the memory when it sent the request.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    #[allow(clippy::mut_from_ref)] // the request's only holder, see above
    fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as in `bytes`. The memory may be uninitialized, which reading a file into it does not mind.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
    )
}

/// What the kernel is told: it makes the application's error of it.
fn code_of(error: &io::Error) -> i32 {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => libc::ENOSPC,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => libc::EPERM,
        io::ErrorKind::InvalidInput => libc::EINVAL,
        _ => libc::EIO,
    };
    -code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_panics_is_answered() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let answer = Answer {
            mailbox: Arc::clone(&mailbox),
            tag: 7,
            result: -libc::EIO,
        };
        let job = move || {
            let _answer = answer;
            panic!("on purpose");
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)).is_err());
        assert_eq!(mailbox.take().done, [(7, -libc::EIO)]);
        assert!(mailbox.take().done.is_empty());
    }

    #[test]
    fn full_disks_and_refusals_have_codes_of_their_own() {
        assert_eq!(code_of(&io::ErrorKind::StorageFull.into()), -libc::ENOSPC);
        assert_eq!(
            code_of(&io::ErrorKind::PermissionDenied.into()),
            -libc::EPERM
        );
        assert_eq!(
            code_of(&io::Error::from_raw_os_error(libc::EDQUOT)),
            -libc::ENOSPC
        );
        assert_eq!(code_of(&io::Error::other("x")), -libc::EIO);
    }

    #[test]
    fn requests_beyond_the_buffer_are_refused() {
        let buffer = IoBuf::new(4096);
        assert!(Buffer::new(&buffer, 4096).is_some());
        assert!(Buffer::new(&buffer, 4097).is_none());
    }
}
