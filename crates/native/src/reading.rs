//! Reads ranges of a stack at any byte, for callers and into descriptors.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overlaybd::record::SECTOR;
use overlaybd::stack::Stack;
use pyo3::prelude::*;

use crate::digest::PIECE_BYTES;
use crate::failure::{About, Failure, Outcome};
use crate::interruptible::{self, Cancel};
use crate::open;

/// Most bytes that one `read` returns.
const MAX_READ: u64 = 1 << 30;

/// See `virtual_size` of the module.
pub fn virtual_size(paths: &[PathBuf], cancel: &Arc<Cancel>) -> Outcome<u64> {
    Ok(open::stack(paths, cancel)?.virtual_size())
}

/// See `read` of the module.
pub fn read(paths: &[PathBuf], offset: u64, length: u64, cancel: &Arc<Cancel>) -> Outcome<Vec<u8>> {
    if length > MAX_READ {
        return Err(Failure::invalid(format!(
            "{length} bytes at once: at most {MAX_READ} are possible"
        )));
    }
    let mut range = Range::open(paths, offset, Some(length), cancel)?;
    let mut bytes = Vec::with_capacity(range.left() as usize);
    while let Some(piece) = range.next()? {
        bytes.extend_from_slice(piece);
    }
    Ok(bytes)
}

/// See `cat` of the module.
///
/// Writes on the caller's own thread: a signal then ends a write that waits for a reader.
pub fn cat(
    py: Python<'_>,
    paths: &[PathBuf],
    sink: &OwnedFd,
    offset: u64,
    length: Option<u64>,
) -> PyResult<u64> {
    let mut range = interruptible::run(py, |cancel| Range::open(paths, offset, length, cancel))?;
    let total = range.left();
    loop {
        let piece = py
            .detach(|| range.next())
            .map_err(|failure| failure.raise(py))?;
        let Some(mut rest) = piece else {
            return Ok(total);
        };
        while !rest.is_empty() {
            let count = py
                .detach(|| write(sink, rest))
                .map_err(|failure| failure.raise(py))?;
            rest = &rest[count..];
            py.check_signals()?;
        }
    }
}

/// Write some; nothing when a signal came first.
fn write(sink: &OwnedFd, bytes: &[u8]) -> Outcome<usize> {
    match rustix::io::write(sink.as_fd(), bytes) {
        Ok(count) => Ok(count),
        Err(rustix::io::Errno::INTR) => Ok(0),
        Err(rustix::io::Errno::PIPE) => Err(Failure::BrokenPipe),
        Err(error) => Err(io::Error::from(error)).about(Path::new("output")),
    }
}

/// A range of bytes of a device, cut at its end.
struct Range {
    stack: Stack,
    top: PathBuf,
    position: u64,
    end: u64,
    buffer: Vec<u8>,
}

impl Range {
    fn open(
        paths: &[PathBuf],
        offset: u64,
        length: Option<u64>,
        cancel: &Arc<Cancel>,
    ) -> Outcome<Self> {
        let stack = open::stack(paths, cancel)?;
        let size = stack.virtual_size();
        Ok(Self {
            top: paths.last().cloned().unwrap_or_default(),
            position: offset,
            end: length.map_or(size, |length| offset.saturating_add(length).min(size)),
            buffer: vec![0; PIECE_BYTES],
            stack,
        })
    }

    /// How many bytes are still to come.
    fn left(&self) -> u64 {
        self.end.saturating_sub(self.position)
    }

    /// The next piece; `None` at the end.
    fn next(&mut self) -> Outcome<Option<&[u8]>> {
        if self.left() == 0 {
            return Ok(None);
        }
        let skipped = self.position % SECTOR;
        let begin = self.position - skipped;
        let count = (self.end - begin).min(PIECE_BYTES as u64);
        // The size of a device is whole sectors, so that rounding up never leaves it.
        let sectors = count.next_multiple_of(SECTOR) as usize;
        self.stack
            .read_at(&mut self.buffer[..sectors], begin)
            .about(&self.top)?;
        self.position = begin + count;
        Ok(Some(&self.buffer[skipped as usize..count as usize]))
    }
}
