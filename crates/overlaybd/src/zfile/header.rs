//! The 512 bytes at the start and at the end of a ZFile: fields, digest, and what in them can be relied on.
//!
//! Files of old writers have garbage wherever a field is unused, so only what is needed is looked at.

use super::{Algorithm, MAX_BLOCKS, MAX_BLOCK_SIZE};
use crate::checksum;
use crate::fields::{u32_at, u64_at};
use crate::{Error, Result};

/// Bytes of the header and of the trailer.
pub const HEADER_SIZE: usize = 512;
const MAGIC: [u8; 24] = *b"ZFile\0\x01\0tuji.yyf@Alibaba";
const STRUCT_SIZE: u32 = 96;
const DIGEST: std::ops::Range<usize> = 28..32;
const FLAGS: usize = 32;

/// First header: unset in the trailer.
const IS_HEADER: u64 = 1;
const IS_DATA: u64 = 1 << 1;
const IS_SEALED: u64 = 1 << 2;
/// The header has the final values of all fields.
const IS_FINAL: u64 = 1 << 3;
const HAS_DIGEST: u64 = 1 << 4;
const HAS_COMPRESSED_TABLE: u64 = 1 << 5;

/// Which of the three a block of 512 bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Written first, before the table is known.
    FirstHeader,
    /// Written over the first header at the end.
    FinalHeader,
    Trailer,
}

/// What a ZFile says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Byte at which the table of block sizes begins, and the blocks end.
    pub index_offset: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Length of the plain bytes.
    pub original_size: u64,
    /// Checksum of the table. Means nothing without digest.
    pub index_crc: u32,
    /// Plain bytes per block.
    pub block_size: u32,
    pub algorithm: Algorithm,
    /// Whether a checksum follows each block.
    pub verify: bool,
    /// Whether header, trailer and table have checksums.
    pub digest: bool,
}

impl Header {
    /// The 512 bytes, always with a digest.
    pub(super) fn encode(&self, part: Part) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        let flags = match part {
            Part::FirstHeader => IS_HEADER | IS_DATA | HAS_DIGEST,
            Part::FinalHeader => IS_HEADER | IS_DATA | HAS_DIGEST | IS_FINAL,
            Part::Trailer => IS_DATA | IS_SEALED | HAS_DIGEST,
        };
        let algorithm = match self.algorithm {
            Algorithm::Lz4 => 1,
            Algorithm::Zstd => 2,
        };
        put(0, &MAGIC);
        put(24, &STRUCT_SIZE.to_le_bytes());
        put(FLAGS, &flags.to_le_bytes());
        put(40, &self.index_offset.to_le_bytes());
        put(48, &self.blocks.to_le_bytes());
        put(56, &self.original_size.to_le_bytes());
        put(64, &self.index_crc.to_le_bytes());
        put(72, &self.block_size.to_le_bytes());
        put(76, &[algorithm]);
        put(88, &[u8::from(self.verify)]);
        let digest = digest(&bytes, flags);
        bytes[DIGEST].copy_from_slice(&digest.to_le_bytes());
        bytes
    }

    /// The header, and whether its fields are final; if not, only the trailer's count.
    pub(super) fn decode_header(bytes: &[u8; HEADER_SIZE]) -> Result<(Self, bool)> {
        let flags = flags_of(bytes, "header")?;
        if flags & IS_HEADER == 0 {
            return Err(Error::Format(
                "zfile: the header says that it is a trailer".to_owned(),
            ));
        }
        let header = Self::decode(bytes, flags, "header")?;
        // Bit 3 may be garbage in old files; no block begins at 0, so such a header was never completed.
        let is_final = flags & IS_FINAL != 0 && header.index_offset != 0;
        Ok((header, is_final))
    }

    pub(super) fn decode_trailer(bytes: &[u8; HEADER_SIZE]) -> Result<Self> {
        let flags = flags_of(bytes, "trailer")?;
        if flags & (IS_HEADER | IS_DATA | IS_SEALED) != IS_DATA | IS_SEALED {
            return Err(Error::Format(format!(
                "zfile: flags {flags:#x} of the trailer are not those of a finished file"
            )));
        }
        Self::decode(bytes, flags, "trailer")
    }

    fn decode(bytes: &[u8; HEADER_SIZE], flags: u64, part: &str) -> Result<Self> {
        let has_digest = flags & HAS_DIGEST != 0;
        let stored = u32_at(bytes, DIGEST.start);
        // A digest that would be right if only its flag were set: the flag is what got damaged.
        if has_digest != (stored == digest(bytes, flags | HAS_DIGEST)) {
            return Err(Error::Format(format!(
                "zfile: digest {stored:#010x} of the {part} does not match its bytes"
            )));
        }
        // Without digest the bit may be garbage; a table that is compressed then fails the check of its sum.
        if has_digest && flags & HAS_COMPRESSED_TABLE != 0 {
            return Err(Error::Unsupported(
                "zfile with a compressed table".to_owned(),
            ));
        }
        let algorithm = match bytes[76] {
            1 => Algorithm::Lz4,
            2 => Algorithm::Zstd,
            other => {
                return Err(Error::Unsupported(format!(
                    "zfile compressed by algorithm {other}"
                )))
            }
        };
        if bytes[78] != 0 || u32_at(bytes, 84) != 0 {
            return Err(Error::Unsupported("zfile with a dictionary".to_owned()));
        }
        let block_size = u32_at(bytes, 72);
        if !block_size.is_power_of_two() {
            return Err(Error::Format(format!(
                "zfile: block size {block_size} is no power of two"
            )));
        }
        if block_size > MAX_BLOCK_SIZE {
            return Err(Error::Limit(format!(
                "zfile: blocks of {block_size} bytes, at most {MAX_BLOCK_SIZE} are read"
            )));
        }
        Ok(Self {
            index_offset: u64_at(bytes, 40),
            blocks: u64_at(bytes, 48),
            original_size: u64_at(bytes, 56),
            index_crc: u32_at(bytes, 64),
            block_size,
            algorithm,
            verify: bytes[88] != 0,
            digest: has_digest,
        })
    }

    /// Whether the fields can be those of a file of `length` bytes: from here on, sizes computed from them are bounded by it.
    pub(super) fn check(&self, length: u64) -> Result<()> {
        if self.blocks > MAX_BLOCKS {
            return Err(Error::Limit(format!(
                "zfile: {} blocks, at most {MAX_BLOCKS} are read",
                self.blocks
            )));
        }
        if self.original_size == 0
            || self.original_size.div_ceil(u64::from(self.block_size)) != self.blocks
        {
            return Err(Error::Format(format!(
                "zfile: {} blocks of {} bytes cannot hold {} bytes",
                self.blocks, self.block_size, self.original_size
            )));
        }
        let end = self
            .index_offset
            .checked_add(self.blocks * 4)
            .and_then(|end| end.checked_add(HEADER_SIZE as u64));
        if self.index_offset < HEADER_SIZE as u64 || end.is_none_or(|end| end > length) {
            return Err(Error::Format(format!(
                "zfile: a table of {} blocks at {} does not fit in {length} bytes",
                self.blocks, self.index_offset
            )));
        }
        Ok(())
    }

    /// Plain bytes of block `block`.
    pub(super) fn plain_length(&self, block: u64) -> u32 {
        let start = block * u64::from(self.block_size);
        (self.original_size - start).min(u64::from(self.block_size)) as u32
    }
}

/// Whether these are the first bytes of a ZFile: magic, and the bit that tells a header from a trailer.
pub(super) fn has_magic(bytes: &[u8; HEADER_SIZE]) -> bool {
    bytes.starts_with(&MAGIC)
}

fn flags_of(bytes: &[u8; HEADER_SIZE], part: &str) -> Result<u64> {
    if !has_magic(bytes) {
        return Err(Error::Format(format!("zfile: the {part} has no magic")));
    }
    Ok(u64_at(bytes, FLAGS))
}

fn digest(bytes: &[u8; HEADER_SIZE], flags: u64) -> u32 {
    let mut bytes = *bytes;
    bytes[DIGEST].fill(0);
    bytes[FLAGS..FLAGS + 8].copy_from_slice(&flags.to_le_bytes());
    checksum::raw(0, &bytes)
}
