//! A device: a stack of layers as a block device, with statistics and events.
//!
//! Must not know of exports, of the protocol, or where files lie.

mod counters;
pub mod uppers;

use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};

use overlaybd::stack::{ExtentKind, Stack};

use crate::backend::{BlockBackend, Content, Extent};
use crate::events::{Event, Events};
use counters::Limiter;
pub use counters::{Counters, Totals};

/// Zeros are written in pieces of this many bytes where they must be stored.
const ZEROES: &[u8] = &[0; 256 * 1024];

/// How far to look ahead for extents at first, bytes; more when there are few.
const EXTENT_WINDOW: u64 = 64 << 20;

/// The block device that a stack is.
pub struct StackDevice {
    name: String,
    stack: Stack,
    counters: Counters,
    events: Events,
    no_space: Limiter,
    io_errors: Limiter,
}

impl StackDevice {
    /// Serve `stack` under `name`.
    #[must_use]
    pub fn new(name: String, stack: Stack, events: Events) -> Self {
        Self {
            name,
            stack,
            counters: Counters::default(),
            events,
            no_space: Limiter::default(),
            io_errors: Limiter::default(),
        }
    }

    /// The stack below.
    #[must_use]
    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// What was done so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.counters.totals()
    }

    /// Run a request. Neither an error nor a defect of what is below gets further than to the client and the events.
    fn request<T>(&self, what: &str, work: impl FnOnce() -> overlaybd::Result<T>) -> io::Result<T> {
        let error = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(overlaybd::Error::Invalid(message))) => {
                // A client's mistake, or a write to a device that was sealed meanwhile.
                let kind = if self.stack.is_read_only() {
                    io::ErrorKind::PermissionDenied
                } else {
                    io::ErrorKind::InvalidInput
                };
                return Err(io::Error::new(kind, message));
            }
            Ok(Err(error)) => error,
            Err(_) => overlaybd::Error::Io(io::Error::other("a defect of the daemon, see its log")),
        };
        self.counters.error();
        if error.is_out_of_space() {
            if self.no_space.permits() {
                tracing::warn!(device = %self.name, "{what}: no space");
                self.events.publish(&Event::NoSpace {
                    device: self.name.clone(),
                });
            }
            return Err(io::ErrorKind::StorageFull.into());
        }
        if self.io_errors.permits() {
            let message = format!("{what}: {error}");
            tracing::error!(device = %self.name, "{message}");
            self.events.publish(&Event::IoError {
                device: self.name.clone(),
                message,
            });
        }
        Err(match error {
            overlaybd::Error::Io(error) => error,
            error => io::Error::other(error),
        })
    }
}

impl BlockBackend for StackDevice {
    fn size(&self) -> u64 {
        self.stack.virtual_size()
    }

    fn is_read_only(&self) -> bool {
        self.stack.is_read_only()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.request("read", || self.stack.read_at(buffer, offset))?;
        self.counters.read(buffer.len());
        Ok(())
    }

    fn try_read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        let done = self.request("read", || self.stack.try_read_at(buffer, offset))?;
        if done {
            self.counters.read(buffer.len());
        }
        Ok(done)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        self.request("write", || self.stack.write_at(buffer, offset))?;
        self.counters.write(buffer.len());
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.request("discard", || self.stack.discard(offset, length))?;
        self.counters.discard(length);
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool) -> io::Result<()> {
        if !allocate {
            self.request("write zeroes", || self.stack.write_zeroes(offset, length))?;
            self.counters.discard(length);
            return Ok(());
        }
        // The client wants no hole: room that later writes find. Only stored bytes are that.
        let mut done = 0;
        while done < length {
            let piece = &ZEROES[..usize::try_from(length - done)
                .map_or(ZEROES.len(), |left| left.min(ZEROES.len()))];
            self.request("write zeroes", || self.stack.write_at(piece, offset + done))?;
            done += piece.len() as u64;
        }
        self.counters
            .write(usize::try_from(length).unwrap_or(usize::MAX));
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.request("flush", || self.stack.flush())?;
        self.counters.flush();
        Ok(())
    }

    fn extents(&self, offset: u64, length: u64, limit: usize) -> io::Result<Vec<Extent>> {
        let mut extents: Vec<Extent> = Vec::new();
        let end = offset + length;
        let mut position = offset;
        let mut window = EXTENT_WINDOW;
        while position < end {
            let stop = end.min(position.saturating_add(window));
            let found = self.request("extents", || self.stack.extents(position..stop))?;
            for extent in found {
                let content = match extent.kind {
                    ExtentKind::Data => Content::Data,
                    ExtentKind::Zero => Content::Zero,
                    ExtentKind::Hole => Content::Hole,
                };
                let full = extents.len() == limit.max(1);
                match extents.last_mut() {
                    Some(last) if last.content == content => last.length += extent.length,
                    _ if full => return Ok(extents),
                    _ => extents.push(Extent {
                        length: extent.length,
                        content,
                    }),
                }
            }
            position = stop;
            window = window.saturating_mul(2);
        }
        Ok(extents)
    }

    fn request_started(&self) {
        self.counters.started();
    }

    fn request_finished(&self) {
        self.counters.finished();
    }
}
