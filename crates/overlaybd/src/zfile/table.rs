//! The jump table: where each compressed block lies.
//!
//! Checks every size against the header before it is used; decompresses nothing.

use std::ops::Range;

use super::header::{Header, HEADER_SIZE};
use super::{max_stored, CHECKSUM_SIZE};
use crate::io::ReadAt;
use crate::{checksum, Error, Result};

/// Blocks between two stored positions: half a byte of memory per block, and at most 15 additions per lookup.
const GROUP: usize = 16;
/// Bytes of the table that are read at once.
const READ_SIZE: u64 = 1 << 20;

/// Sizes of all blocks and positions of some, 4.5 bytes of memory per block.
pub(super) struct Table {
    sizes: Vec<u32>,
    starts: Vec<u64>,
}

impl Table {
    /// Read and check the table that `header` (already checked against the source's length) describes.
    pub fn read(source: &dyn ReadAt, header: &Header) -> Result<Self> {
        let smallest = if header.verify {
            CHECKSUM_SIZE as u32 + 1
        } else {
            1
        };
        let mut table = Self {
            sizes: Vec::new(),
            starts: Vec::new(),
        };
        let mut position = HEADER_SIZE as u64;
        let mut crc = 0;
        let mut left = header.blocks * 4;
        let mut chunk = vec![0; left.min(READ_SIZE) as usize];
        // Memory grows with what was read and found good, not with what the header promises: files may be sparse.
        while left > 0 {
            let part = left.min(READ_SIZE) as usize;
            let chunk = &mut chunk[..part];
            source.read_exact_at(chunk, header.index_offset + header.blocks * 4 - left)?;
            crc = checksum::raw(crc, chunk);
            for entry in chunk.chunks_exact(4) {
                let size = crate::fields::u32_at(entry, 0);
                let block = table.sizes.len();
                if size < smallest || size > max_stored(header.plain_length(block as u64)) {
                    return Err(Error::Format(format!(
                        "zfile: block {block} cannot have {size} bytes"
                    )));
                }
                if block % GROUP == 0 {
                    table.starts.push(position);
                }
                table.sizes.push(size);
                position += u64::from(size);
            }
            left -= part as u64;
        }
        if position != header.index_offset {
            return Err(Error::Format(format!(
                "zfile: blocks end at {position} and the table begins at {}",
                header.index_offset
            )));
        }
        if header.digest && crc != header.index_crc {
            return Err(Error::Format(format!(
                "zfile: checksum {crc:#010x} of the table should be {:#010x}",
                header.index_crc
            )));
        }
        Ok(table)
    }

    /// The bytes of block `block`, checksum included.
    pub fn place(&self, block: u64) -> Range<u64> {
        let block = block as usize;
        let group = block / GROUP;
        let before: u64 = self.sizes[group * GROUP..block]
            .iter()
            .copied()
            .map(u64::from)
            .sum();
        let start = self.starts[group] + before;
        start..start + u64::from(self.sizes[block])
    }

    /// Bytes of block `block`, checksum included.
    pub fn size(&self, block: u64) -> usize {
        self.sizes[block as usize] as usize
    }
}
