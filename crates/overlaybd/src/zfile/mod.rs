//! ZFile: any file as compressed blocks of equal plain size, readable at any offset.
//!
//! [`ZFile`] shows the plain bytes of one, [`Writer`] makes one. Knows nothing of what the plain bytes are.

mod codec;
mod header;
mod reader;
mod table;
mod writer;

pub use reader::{is_zfile, ZFile};
pub use writer::{Options, Summary, Writer};

pub use header::{Header, HEADER_SIZE};

/// How blocks are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// LZ4, each block a bare LZ4 block.
    Lz4,
    /// Zstandard, each block a frame.
    Zstd,
}

/// Plain bytes per block unless asked otherwise.
pub const DEFAULT_BLOCK_SIZE: u32 = 4096;
/// Largest block that is written: one of the two known readers fails on incompressible blocks of 64 KiB.
pub const MAX_WRITTEN_BLOCK_SIZE: u32 = 32 << 10;
/// Smallest block that is written.
pub const MIN_WRITTEN_BLOCK_SIZE: u32 = 4 << 10;
/// Largest block that is read.
pub const MAX_BLOCK_SIZE: u32 = 64 << 10;
/// Most blocks of one file: 1 TiB of plain bytes in blocks of 4 KiB, whose table takes 1.1 GiB of memory.
pub const MAX_BLOCKS: u64 = 1 << 28;

/// Bytes of the checksum behind each block.
const CHECKSUM_SIZE: usize = 4;

/// The most that a block of `plain` bytes can take when compressed, checksum included: what either algorithm promises for
/// incompressible input, and some more.
const fn max_stored(plain: u32) -> u32 {
    plain + plain / 64 + 512
}
