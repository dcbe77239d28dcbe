//! The transmission phase: requests are read in batches and answered, in any order.
//!
//! The connection's thread answers by itself what the page cache holds. What may wait for a disk goes to the workers, unless
//! no other request waits behind it. Memory per connection is bounded, whatever the client sends or does not read.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags};

use super::answer::{
    block_status, error_reply, read_header_size, read_reply, status_reply, write_read_header,
    EXTENTS,
};
use super::outbox::Outbox;
use super::receiver::Receiver;
use super::replies::Replies;
use super::request::Request;
use super::wire::{self, command, command_flag};
use super::Agreement;
use crate::backend::BlockBackend;
use crate::export::Target;

/// After this long without a request a connection gives its buffers back.
const IDLE: Duration = Duration::from_secs(1);
/// Replies that the kernel holds for a client that is busy, bytes.
const SEND_BUFFER: usize = 1 << 20;
/// A large write that has the connection for itself goes to the device in pieces of this many bytes.
const PIECE: usize = 1 << 20;
/// A write that took longer than this means that the disk is busy, and not only the processors.
const SLOW: Duration = Duration::from_millis(10);
/// So many writes after a slow one go to the workers.
const AFTER_SLOW: u32 = 32;

/// Serve requests until the client disconnects or the socket is shut down from elsewhere (keep a clone for that).
/// Returns when no request is in flight any more. Clients that break the protocol are disconnected: an error says why.
///
/// # Errors
/// The stream's, or `InvalidData` for a client that breaks the protocol.
pub fn serve_transmission(
    stream: impl Into<Arc<UnixStream>>,
    target: &Target,
    agreement: Agreement,
) -> io::Result<()> {
    let stream: Arc<UnixStream> = stream.into();
    stream.set_read_timeout(Some(IDLE))?;
    enlarge_send_buffer(&stream);
    let mut connection = Connection {
        outbox: Arc::new(Outbox::new(Arc::clone(&stream))),
        stream,
        target,
        agreement,
        receiver: Receiver::new(),
        replies: Replies::new(),
        payload: Vec::new(),
        slow_writes: 0,
    };
    let result = connection.run();
    connection.outbox.finish();
    match result {
        // The client went away in the middle: its business.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
            ) =>
        {
            Ok(())
        }
        result => result,
    }
}

struct Connection<'a> {
    stream: Arc<UnixStream>,
    target: &'a Target,
    agreement: Agreement,
    receiver: Receiver,
    replies: Replies,
    outbox: Arc<Outbox>,
    payload: Vec<u8>,
    slow_writes: u32,
}

/// Counts a request as in flight while it exists.
struct InFlight(Arc<dyn BlockBackend>);

impl InFlight {
    fn new(backend: &Arc<dyn BlockBackend>) -> Self {
        backend.request_started();
        Self(Arc::clone(backend))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.request_finished();
    }
}

impl Connection<'_> {
    fn run(&mut self) -> io::Result<()> {
        while self.fill(wire::REQUEST_SIZE)? {
            let mut header = [0; wire::REQUEST_SIZE];
            self.receiver.take(&mut header);
            let Some(request) = Request::decode(&header) else {
                return Err(broken("a request without its magic number"));
            };
            if request.command == command::DISCONNECT {
                return self.replies.send(&self.outbox);
            }
            if !self.serve(request)? {
                break;
            }
        }
        self.replies.send(&self.outbox)
    }

    /// Wait until `count` bytes are there; `false` when the stream ends before.
    fn fill(&mut self, count: usize) -> io::Result<bool> {
        while self.receiver.available().len() < count {
            self.replies.send(&self.outbox)?;
            if !self.receive()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn receive(&mut self) -> io::Result<bool> {
        loop {
            self.wait_if_busy()?;
            match self.receiver.receive(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_idle()?,
                result => return result,
            }
        }
    }

    /// While jobs are under way, wait for the client and look after replies that workers could not send.
    fn wait_if_busy(&self) -> io::Result<()> {
        while self.outbox.is_busy() {
            let Some(wake) = self.outbox.wake_descriptor() else {
                return Ok(());
            };
            let mut descriptors = [
                PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(wake, PollFlags::IN),
            ];
            match poll(&mut descriptors, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let [client, wake] = descriptors.map(|descriptor| !descriptor.revents().is_empty());
            if wake {
                self.outbox.send_left()?;
            }
            if client {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The client has been idle for a while: hold nothing until it comes back.
    fn wait_idle(&mut self) -> io::Result<()> {
        if self.outbox.is_busy() {
            return Ok(());
        }
        self.receiver.release();
        self.replies.release();
        self.payload = Vec::new();
        let mut descriptors = [PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::IN)];
        match poll(&mut descriptors, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether no other request would wait for one that is done by this thread.
    fn is_alone(&self) -> bool {
        self.receiver.available().is_empty() && !self.outbox.is_busy()
    }

    /// Do one request, or give it to the workers. `false` when the stream ended within it.
    fn serve(&mut self, request: Request) -> io::Result<bool> {
        if request.payload() > wire::MAXIMUM_PAYLOAD as usize {
            return Err(broken("a payload beyond the maximum"));
        }
        let in_flight = InFlight::new(&self.target.backend);
        if let Err(number) = request.check(&*self.target.backend) {
            if !self.skip(request.payload())? {
                return Ok(false);
            }
            self.replies
                .push(&error_reply(&request, number, self.agreement), &self.outbox)?;
            return Ok(true);
        }
        match request.command {
            command::READ => self.read(&request, in_flight)?,
            command::WRITE => return self.write(&request, in_flight),
            _ => self.other(request, in_flight)?,
        }
        Ok(true)
    }

    fn skip(&mut self, mut count: usize) -> io::Result<bool> {
        while count > 0 {
            if !self.fill(1)? {
                return Ok(false);
            }
            let here = count.min(self.receiver.available().len());
            self.receiver.consume(here);
            count -= here;
        }
        Ok(true)
    }

    fn read(&mut self, request: &Request, in_flight: InFlight) -> io::Result<()> {
        let length = request.length as usize;
        let header = read_header_size(self.agreement);
        let room = self.replies.reserve(header + length, &self.outbox)?;
        let data = &mut room[header..];
        let backend = &self.target.backend;
        let mut result = backend.try_read_at(data, request.offset);
        if matches!(result, Ok(false)) {
            if !self.is_alone() {
                let (request, agreement) = (*request, self.agreement);
                return self.job(in_flight, header + length, move |backend| {
                    read_reply(backend, &request, agreement)
                });
            }
            // Nothing may wait for this read, finished replies neither.
            self.replies.send(&self.outbox)?;
            let room = self.replies.reserve(header + length, &self.outbox)?;
            result = backend
                .read_at(&mut room[header..], request.offset)
                .map(|()| true);
        }
        match result {
            Ok(_) => {
                let room = self.replies.reserve(header + length, &self.outbox)?;
                write_read_header(room, request, self.agreement);
                self.replies.commit(header + length);
                Ok(())
            }
            Err(error) => {
                let reply = error_reply(request, wire::error_number(&error), self.agreement);
                self.replies.push(&reply, &self.outbox)
            }
        }
    }

    fn write(&mut self, request: &Request, in_flight: InFlight) -> io::Result<bool> {
        let length = request.length as usize;
        if self.slow_writes == 0 && length <= Receiver::WHOLE {
            if !self.fill(length)? {
                return Ok(false);
            }
            let started = Instant::now();
            let payload = &self.receiver.available()[..length];
            let result = self.target.backend.write_at(payload, request.offset);
            self.receiver.consume(length);
            self.note_write(started);
            self.finish_write(*request, in_flight, result)?;
            return Ok(true);
        }
        if self.slow_writes == 0 && !self.outbox.is_busy() {
            return self.write_in_pieces(request, in_flight);
        }
        self.slow_writes = self.slow_writes.saturating_sub(1);
        self.replies.send(&self.outbox)?;
        self.outbox.begin_job(length)?;
        let mut payload = Vec::with_capacity(length);
        if !self.receive_payload(&mut payload, length)? {
            self.outbox.finish_job(Vec::new(), length);
            return Ok(false);
        }
        let (request, agreement) = (*request, self.agreement);
        self.submit(in_flight, length, move |backend| {
            let result = backend
                .write_at(&payload, request.offset)
                .and_then(|()| flush_if_asked(backend, &request));
            status_reply(&request, result, agreement)
        });
        Ok(true)
    }

    /// A large write, as it arrives.
    fn write_in_pieces(&mut self, request: &Request, in_flight: InFlight) -> io::Result<bool> {
        self.replies.send(&self.outbox)?;
        let mut result = Ok(());
        let mut done = 0;
        let mut piece = std::mem::take(&mut self.payload);
        let started = Instant::now();
        while done < request.length as usize {
            let length = PIECE.min(request.length as usize - done);
            piece.clear();
            if !self.receive_payload(&mut piece, length)? {
                return Ok(false);
            }
            if result.is_ok() {
                result = self
                    .target
                    .backend
                    .write_at(&piece, request.offset + done as u64);
            }
            done += length;
        }
        self.payload = piece;
        self.note_write(started);
        self.finish_write(*request, in_flight, result)?;
        Ok(true)
    }

    /// Append exactly `length` bytes of the stream. `false` when it ends before.
    fn receive_payload(&mut self, payload: &mut Vec<u8>, length: usize) -> io::Result<bool> {
        payload.reserve_exact(length);
        let here = length.min(self.receiver.available().len());
        payload.extend_from_slice(&self.receiver.available()[..here]);
        self.receiver.consume(here);
        while payload.len() < length {
            let missing = (length - payload.len()) as u64;
            // Reads into spare capacity, so that memory is touched only as bytes arrive.
            match (&*self.stream).take(missing).read_to_end(payload) {
                Ok(0) => return Ok(false),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn note_write(&mut self, started: Instant) {
        if started.elapsed() > SLOW {
            self.slow_writes = AFTER_SLOW;
        }
    }

    fn finish_write(
        &mut self,
        request: Request,
        in_flight: InFlight,
        result: io::Result<()>,
    ) -> io::Result<()> {
        if result.is_ok() && request.has(command_flag::FUA) {
            let agreement = self.agreement;
            return self.slow(in_flight, wire::SIMPLE_REPLY_SIZE, move |backend| {
                status_reply(&request, backend.flush(), agreement)
            });
        }
        let reply = status_reply(&request, result, self.agreement);
        self.replies.push(&reply, &self.outbox)
    }

    fn other(&mut self, request: Request, in_flight: InFlight) -> io::Result<()> {
        let agreement = self.agreement;
        let budget = wire::CHUNK_SIZE + 8 * EXTENTS;
        self.slow(in_flight, budget, move |backend| match request.command {
            command::FLUSH => status_reply(&request, backend.flush(), agreement),
            command::BLOCK_STATUS => block_status(backend, &request, agreement),
            command::TRIM => {
                let result = backend.discard(request.offset, u64::from(request.length));
                let result = result.and_then(|()| flush_if_asked(backend, &request));
                status_reply(&request, result, agreement)
            }
            _ => {
                let allocate = request.has(command_flag::NO_HOLE);
                let result =
                    backend.write_zeroes(request.offset, u64::from(request.length), allocate);
                let result = result.and_then(|()| flush_if_asked(backend, &request));
                status_reply(&request, result, agreement)
            }
        })
    }

    /// Do what may wait for a disk: here if nobody waits for this thread, else by a worker.
    fn slow(
        &mut self,
        in_flight: InFlight,
        budget: usize,
        work: impl FnOnce(&dyn BlockBackend) -> Vec<u8> + Send + 'static,
    ) -> io::Result<()> {
        if !self.is_alone() {
            return self.job(in_flight, budget, work);
        }
        self.replies.send(&self.outbox)?;
        let reply = work(&*in_flight.0);
        self.replies.push(&reply, &self.outbox)
    }

    fn job(
        &mut self,
        in_flight: InFlight,
        budget: usize,
        work: impl FnOnce(&dyn BlockBackend) -> Vec<u8> + Send + 'static,
    ) -> io::Result<()> {
        self.outbox.begin_job(budget)?;
        self.submit(in_flight, budget, work);
        Ok(())
    }

    fn submit(
        &mut self,
        in_flight: InFlight,
        budget: usize,
        work: impl FnOnce(&dyn BlockBackend) -> Vec<u8> + Send + 'static,
    ) {
        let outbox = Arc::clone(&self.outbox);
        self.target.workers.submit(move || {
            let reply = work(&*in_flight.0);
            drop(in_flight);
            outbox.finish_job(reply, budget);
        });
    }
}

/// Without room in the socket, this thread and the client take turns instead of working at the same time.
fn enlarge_send_buffer(stream: &UnixStream) {
    use rustix::net::sockopt;
    if sockopt::set_socket_send_buffer_size_force(stream, SEND_BUFFER).is_err() {
        // Beyond the host's limit only for root. As much as the limit allows then; without that it is slower, no more.
        let _ = sockopt::set_socket_send_buffer_size(stream, SEND_BUFFER);
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn flush_if_asked(backend: &dyn BlockBackend, request: &Request) -> io::Result<()> {
    if request.has(command_flag::FUA) {
        backend.flush()
    } else {
        Ok(())
    }
}
