//! One request as the client sent it, and whether it may be done.
//!
//! No I/O: bytes in, verdict out.

use super::wire::{self, command, command_flag, errno};
use crate::backend::{BlockBackend, SECTOR};

/// A request's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    /// Bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
}

impl Request {
    /// Decode a header; `None` when it does not begin as one, after which nothing of the stream can be trusted.
    pub fn decode(bytes: &[u8; wire::REQUEST_SIZE]) -> Option<Self> {
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| (u64::from(word(at)) << 32) | u64::from(word(at + 4));
        (word(0) == wire::REQUEST_MAGIC).then(|| Self {
            flags: u16::from_be_bytes([bytes[4], bytes[5]]),
            command: u16::from_be_bytes([bytes[6], bytes[7]]),
            cookie: long(8),
            offset: long(16),
            length: word(24),
        })
    }

    /// Bytes that follow the header.
    pub fn payload(&self) -> usize {
        if self.command == command::WRITE {
            self.length as usize
        } else {
            0
        }
    }

    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// The error number to answer with when the request cannot be done whatever the device holds.
    pub fn check(&self, backend: &dyn BlockBackend) -> Result<(), u32> {
        let (allowed, writes) = match self.command {
            command::READ => (command_flag::DONT_FRAGMENT, false),
            command::WRITE | command::TRIM => (0, true),
            command::WRITE_ZEROES => (command_flag::NO_HOLE, true),
            command::FLUSH => {
                return if self.has(!command_flag::FUA) {
                    Err(errno::INVALID)
                } else {
                    Ok(())
                }
            }
            command::BLOCK_STATUS => (command_flag::ONE_EXTENT, false),
            _ => return Err(errno::INVALID),
        };
        // FUA is allowed everywhere, and without meaning where nothing is written.
        if self.has(!(allowed | command_flag::FUA)) {
            return Err(errno::INVALID);
        }
        if writes && backend.is_read_only() {
            return Err(errno::PERM);
        }
        if self.offset % SECTOR != 0 || u64::from(self.length) % SECTOR != 0 {
            return Err(errno::INVALID);
        }
        if self.command == command::READ && self.length > wire::MAXIMUM_PAYLOAD {
            return Err(errno::INVALID);
        }
        let end = self.offset.checked_add(u64::from(self.length));
        if end.is_none_or(|end| end > backend.size()) {
            return Err(if writes {
                errno::NO_SPACE
            } else {
                errno::INVALID
            });
        }
        Ok(())
    }
}
