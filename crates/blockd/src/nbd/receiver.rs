//! What a client has sent and nobody has looked at yet: one buffer, filled with as much as there is.
//!
//! Several requests arrive with one system call. The buffer goes away while the client is idle.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

/// Room for a batch of small requests, bytes; payloads up to this size need no other buffer.
const CAPACITY: usize = 128 * 1024;

/// The receiving side of a connection.
pub(super) struct Receiver {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Receiver {
    /// Payloads of up to this many bytes come as one slice.
    pub const WHOLE: usize = CAPACITY;

    pub fn new() -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            end: 0,
        }
    }

    /// What is there.
    pub fn available(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Forget `count` bytes of [`Receiver::available`].
    pub fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Take what there is into `buffer`, as far as it fits.
    pub fn take(&mut self, buffer: &mut [u8]) -> usize {
        let count = buffer.len().min(self.end - self.start);
        buffer[..count].copy_from_slice(&self.available()[..count]);
        self.consume(count);
        count
    }

    /// Give the memory back; only when nothing is there.
    pub fn release(&mut self) {
        if self.start == self.end {
            *self = Self::new();
        }
    }

    /// Receive what there is room for. `false` at the end of the stream.
    ///
    /// # Errors
    /// The stream's; `WouldBlock` when it has a timeout that passed.
    pub fn receive(&mut self, mut stream: &UnixStream) -> io::Result<bool> {
        if self.buffer.is_empty() {
            self.buffer = vec![0; CAPACITY];
        }
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        loop {
            match stream.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    self.end += count;
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
