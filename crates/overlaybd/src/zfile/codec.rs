//! Compression of single blocks with reusable contexts, checksum behind the compressed bytes included.
//!
//! One block in, one block out: knows nothing of files or positions.

use lz4_flex::block::{
    compress_into_with_table, decompress_into, get_maximum_output_size, CompressTable,
};
use zstd::bulk::{Compressor, Decompressor};

use super::{Algorithm, CHECKSUM_SIZE};
use crate::{checksum, Error, Result};

/// The level of the reference implementation.
const ZSTD_LEVEL: i32 = 3;

/// Compresses blocks one after another.
pub(super) struct Encoder {
    context: EncoderContext,
    verify: bool,
}

enum EncoderContext {
    Lz4(CompressTable),
    Zstd(Compressor<'static>),
}

impl Encoder {
    pub fn new(algorithm: Algorithm, verify: bool) -> Result<Self> {
        let context = match algorithm {
            Algorithm::Lz4 => EncoderContext::Lz4(CompressTable::small()),
            Algorithm::Zstd => EncoderContext::Zstd(Compressor::new(ZSTD_LEVEL)?),
        };
        Ok(Self { context, verify })
    }

    /// Append the stored form of `plain` to `stored`; returns its length.
    pub fn append(&mut self, plain: &[u8], stored: &mut Vec<u8>) -> Result<u32> {
        let start = stored.len();
        let room = match &self.context {
            EncoderContext::Lz4(_) => get_maximum_output_size(plain.len()),
            EncoderContext::Zstd(_) => zstd::zstd_safe::compress_bound(plain.len()),
        };
        stored.resize(start + room, 0);
        let output = &mut stored[start..];
        let length = match &mut self.context {
            EncoderContext::Lz4(table) => compress_into_with_table(plain, output, table)
                .map_err(|error| Error::Invalid(format!("LZ4 compression failed: {error}")))?,
            EncoderContext::Zstd(context) => context.compress_to_buffer(plain, output)?,
        };
        stored.truncate(start + length);
        if self.verify {
            let crc = checksum::raw(checksum::BLOCK_SALT, &stored[start..]);
            stored.extend_from_slice(&crc.to_le_bytes());
        }
        Ok((stored.len() - start) as u32)
    }
}

/// Decompresses blocks one after another.
#[derive(Default)]
pub(super) struct Decoder {
    zstd: Option<Decompressor<'static>>,
}

impl Decoder {
    /// Fill `plain`, whose length is the one that the block must have, from the stored form.
    pub fn decode(
        &mut self,
        algorithm: Algorithm,
        verify: bool,
        stored: &[u8],
        plain: &mut [u8],
    ) -> std::result::Result<(), String> {
        let compressed = if verify { check(stored)? } else { stored };
        let length = match algorithm {
            Algorithm::Lz4 => {
                decompress_into(compressed, plain).map_err(|error| error.to_string())?
            }
            Algorithm::Zstd => {
                let context = match &mut self.zstd {
                    Some(context) => context,
                    none => none.insert(Decompressor::new().map_err(|error| error.to_string())?),
                };
                context
                    .decompress_to_buffer(compressed, plain)
                    .map_err(|error| error.to_string())?
            }
        };
        if length != plain.len() {
            return Err(format!("{length} plain bytes instead of {}", plain.len()));
        }
        Ok(())
    }
}

fn check(stored: &[u8]) -> std::result::Result<&[u8], String> {
    let (compressed, expected) = stored
        .split_last_chunk::<CHECKSUM_SIZE>()
        .ok_or_else(|| "no room for a checksum".to_owned())?;
    let crc = checksum::raw(checksum::BLOCK_SALT, compressed);
    let expected = u32::from_le_bytes(*expected);
    if crc == expected {
        Ok(compressed)
    } else {
        Err(format!("checksum {crc:#010x} should be {expected:#010x}"))
    }
}
