//! Reads ranges of a stack at any byte, for callers and into descriptors.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overlaybd::record::SECTOR;
use overlaybd::stack::Stack;

use crate::digest::PIECE_BYTES;
use crate::failure::{About, Failure, Outcome};
use crate::interruptible::Cancel;
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
    let mut bytes = Vec::new();
    Range::open(paths, offset, Some(length), cancel)?.pieces(|piece| {
        bytes.extend_from_slice(piece);
        Ok(())
    })?;
    Ok(bytes)
}

/// See `cat` of the module.
pub fn cat(
    paths: &[PathBuf],
    mut sink: impl Write,
    offset: u64,
    length: Option<u64>,
    cancel: &Arc<Cancel>,
) -> Outcome<u64> {
    let range = Range::open(paths, offset, length, cancel)?;
    range.pieces(|piece| match sink.write_all(piece) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Failure::BrokenPipe),
        other => other.about(Path::new("output")),
    })?;
    Ok(range.end.saturating_sub(range.start))
}

/// A range of bytes of a device, cut at its end.
struct Range<'a> {
    stack: Stack,
    top: &'a Path,
    start: u64,
    end: u64,
    cancel: &'a Cancel,
}

impl<'a> Range<'a> {
    fn open(
        paths: &'a [PathBuf],
        offset: u64,
        length: Option<u64>,
        cancel: &'a Arc<Cancel>,
    ) -> Outcome<Self> {
        let stack = open::stack(paths, cancel)?;
        let size = stack.virtual_size();
        let end = length.map_or(size, |length| offset.saturating_add(length).min(size));
        let top = paths.last().map_or(Path::new("stack"), PathBuf::as_path);
        Ok(Self {
            stack,
            top,
            start: offset,
            end,
            cancel,
        })
    }

    /// Give the bytes piece by piece to `take`.
    fn pieces(&self, mut take: impl FnMut(&[u8]) -> Outcome<()>) -> Outcome<()> {
        let mut buffer = vec![0; PIECE_BYTES];
        let mut position = self.start;
        while position < self.end {
            self.cancel.check().about(self.top)?;
            let skipped = position % SECTOR;
            let begin = position - skipped;
            let count = (self.end - begin).min(PIECE_BYTES as u64);
            // The size of a device is whole sectors, so that rounding up never leaves it.
            let sectors = count.next_multiple_of(SECTOR) as usize;
            self.stack
                .read_at(&mut buffer[..sectors], begin)
                .about(self.top)?;
            take(&buffer[skipped as usize..count as usize])?;
            position = begin + count;
        }
        Ok(())
    }
}
