//! The replies that the connection's own thread has ready and not yet sent: one buffer, sent with one system call.

use std::io;

use super::outbox::Outbox;

/// Replies are sent when this much is there, bytes.
const BATCH: usize = 256 * 1024;
/// The buffer's first size, bytes: large enough for the allocator to take it from the kernel and to give it back.
const FIRST: usize = 128 * 1024;
/// A buffer that one huge read made larger than this is given back at once, bytes.
const KEPT: usize = 4 << 20;

/// A batch of replies in the making.
pub(super) struct Replies {
    buffer: Vec<u8>,
    used: usize,
}

impl Replies {
    pub fn new() -> Self {
        Self {
            buffer: Vec::new(),
            used: 0,
        }
    }

    /// Room for `length` bytes, to be filled and then kept by [`Replies::commit`]. May send what is there.
    pub fn reserve(&mut self, length: usize, outbox: &Outbox) -> io::Result<&mut [u8]> {
        if self.used > 0 && self.used + length > BATCH {
            self.send(outbox)?;
        }
        let end = self.used + length;
        if self.buffer.len() < end {
            self.buffer.resize(end.max(FIRST), 0);
        }
        Ok(&mut self.buffer[self.used..end])
    }

    /// Keep the first `length` bytes of what was reserved.
    pub fn commit(&mut self, length: usize) {
        self.used += length;
    }

    /// Append a finished reply.
    pub fn push(&mut self, reply: &[u8], outbox: &Outbox) -> io::Result<()> {
        self.reserve(reply.len(), outbox)?.copy_from_slice(reply);
        self.commit(reply.len());
        Ok(())
    }

    /// Send all; waits for the client.
    pub fn send(&mut self, outbox: &Outbox) -> io::Result<()> {
        if self.used == 0 {
            return Ok(());
        }
        let result = outbox.send(&self.buffer[..self.used]);
        self.used = 0;
        if self.buffer.len() > KEPT {
            self.release();
        }
        result
    }

    /// Give the memory back; only when all is sent.
    pub fn release(&mut self) {
        if self.used == 0 {
            self.buffer = Vec::new();
        }
    }
}
