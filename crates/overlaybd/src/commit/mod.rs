//! Writing whole layers: from an upper, from a run of layers, from a stack, from a raw image. Output is sequential; naming,
//! syncing and digests of the output are the caller's.

mod writer;

pub use writer::{CommitOptions, Committed, LayerWriter, Sink};

use std::ops::Range;

use crate::io::ReadAt;
use crate::layer::MAX_VIRTUAL_SIZE;
use crate::record::SECTOR;
use crate::stack::{ExtentKind, Lowers, Stack, View};
use crate::upper::Upper;
use crate::{Error, Result};

/// Bytes that are read at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// Write what the upper alone holds as one layer. The upper stays as it is; it must not be written meanwhile.
///
/// # Errors
/// [`Error::Limit`] when the layer would have too many records, [`Error::Io`], or what the sink returns.
pub fn commit_upper(
    upper: &Upper,
    sink: &mut dyn Sink,
    options: CommitOptions,
) -> Result<Committed> {
    let view = View {
        lowers: None,
        upper: Some(upper),
    };
    write_view(view, upper.virtual_size(), sink, options)
}

/// Write layers as one that holds what they hold together.
///
/// # Errors
/// As [`commit_upper`].
pub fn merge(layers: &Lowers, sink: &mut dyn Sink, options: CommitOptions) -> Result<Committed> {
    let view = View {
        lowers: Some(layers),
        upper: None,
    };
    write_view(view, layers.virtual_size(), sink, options)
}

/// Write all that a stack holds, upper included, as one layer. The stack must not be written meanwhile.
///
/// # Errors
/// As [`commit_upper`].
pub fn flatten(stack: &Stack, sink: &mut dyn Sink, options: CommitOptions) -> Result<Committed> {
    stack.with_view(|view| write_view(view, stack.virtual_size(), sink, options))
}

/// Write a raw image as one layer. `extents` are the byte ranges that hold data, ascending (see
/// [`crate::io::WriteAt::data_extents`]); the rest is taken for zeros. The size of the device is that of the source,
/// rounded up to 512 bytes, unless the options say another.
///
/// # Errors
/// As [`commit_upper`]; [`Error::Invalid`] when extents are not ascending or reach beyond the size.
pub fn from_raw(
    source: &dyn ReadAt,
    extents: impl IntoIterator<Item = Range<u64>>,
    sink: &mut dyn Sink,
    options: CommitOptions,
) -> Result<Committed> {
    let length = source.len()?;
    let size = options
        .virtual_size
        .unwrap_or_else(|| length.next_multiple_of(SECTOR));
    let keep_zeroes = options.keep_zeroes;
    let mut writer = LayerWriter::new(
        sink,
        CommitOptions {
            virtual_size: Some(size),
            ..options
        },
    )?;
    let mut done = 0;
    let mut buffer = Vec::new();
    for extent in extents {
        // Whole blocks, so that zeros are seen; what surrounds the extent in them is zeros anyway.
        let start = (extent.start / BLOCK_BYTES * BLOCK_BYTES).max(done);
        let end = extent.end.next_multiple_of(BLOCK_BYTES).min(size);
        if extent.end > length || extent.end > size || extent.end < extent.start {
            return Err(Error::Invalid(format!(
                "the extent {extent:?} of an image of {length} bytes"
            )));
        }
        if end <= start {
            continue;
        }
        if keep_zeroes {
            writer.write_zeroes(done, start - done)?;
        }
        for chunk in chunks(start..end) {
            buffer.clear();
            buffer.resize((chunk.end - chunk.start) as usize, 0);
            let there = length
                .saturating_sub(chunk.start)
                .min(chunk.end - chunk.start) as usize;
            source.read_exact_at(&mut buffer[..there], chunk.start)?;
            writer.write(chunk.start, &buffer)?;
        }
        done = end;
    }
    if keep_zeroes {
        writer.write_zeroes(done, size - done)?;
    }
    writer.finish()
}

/// The unit in which zeros are found.
const BLOCK_BYTES: u64 = writer::BLOCK_SECTORS * SECTOR;

fn write_view(
    view: View<'_>,
    virtual_size: u64,
    sink: &mut dyn Sink,
    options: CommitOptions,
) -> Result<Committed> {
    let size = options.virtual_size.unwrap_or(virtual_size);
    let mut writer = LayerWriter::new(
        sink,
        CommitOptions {
            virtual_size: Some(size),
            ..options
        },
    )?;
    let mut buffer = Vec::new();
    // Layers that leave the size to the one below hold something all the same.
    let end = if size == 0 { MAX_VIRTUAL_SIZE } else { size };
    view.extents(0, end.div_ceil(SECTOR), |extent| match extent.kind {
        ExtentKind::Hole => Ok(()),
        ExtentKind::Zero => writer.write_zeroes(extent.offset, extent.length),
        ExtentKind::Data => {
            for chunk in chunks(extent.offset..extent.offset + extent.length) {
                buffer.resize((chunk.end - chunk.start) as usize, 0);
                view.read(&mut buffer, chunk.start / SECTOR)?;
                writer.write(chunk.start, &buffer)?;
            }
            Ok(())
        }
    })?;
    writer.finish()
}

/// Cut a range of bytes at multiples of the chunk size, so that no aligned block of zeros is cut.
fn chunks(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut position = range.start;
    std::iter::from_fn(move || {
        let start = position;
        position = (start / CHUNK_BYTES + 1)
            .saturating_mul(CHUNK_BYTES)
            .min(range.end);
        (start < range.end).then_some(start..position)
    })
}
