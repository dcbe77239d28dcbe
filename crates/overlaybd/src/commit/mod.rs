//! Writing whole layers: from an upper, from a run of layers, from a stack, from a raw image. Output is sequential; naming,
//! syncing and digests of the output are the caller's.

mod writer;

pub use writer::{CommitOptions, Committed, LayerWriter, Sink};

use std::ops::Range;

use crate::io::ReadAt;
use crate::stack::{Lowers, Stack};
use crate::upper::Upper;
use crate::Result;

/// Write what the upper alone holds as one layer. The upper stays as it is; it must not be written meanwhile.
///
/// # Errors
/// [`crate::Error::Limit`] when the layer would have too many records, [`crate::Error::Io`], or what the sink returns.
pub fn commit_upper(
    upper: &Upper,
    sink: &mut dyn Sink,
    options: CommitOptions,
) -> Result<Committed> {
    let _ = (upper, sink, options);
    todo!()
}

/// Write layers as one that holds what they hold together.
///
/// # Errors
/// As [`commit_upper`].
pub fn merge(layers: &Lowers, sink: &mut dyn Sink, options: CommitOptions) -> Result<Committed> {
    let _ = (layers, sink, options);
    todo!()
}

/// Write all that a stack holds, upper included, as one layer. The stack must not be written meanwhile.
///
/// # Errors
/// As [`commit_upper`].
pub fn flatten(stack: &Stack, sink: &mut dyn Sink, options: CommitOptions) -> Result<Committed> {
    let _ = (stack, sink, options);
    todo!()
}

/// Write a raw image as one layer. `extents` are the byte ranges that hold data, ascending (see
/// [`crate::io::WriteAt::data_extents`]); the rest is taken for zeros. The size of the device is that of the source,
/// rounded up to 512 bytes, unless the options say another.
///
/// # Errors
/// As [`commit_upper`]; [`crate::Error::Invalid`] when extents are not ascending or reach beyond the size.
pub fn from_raw(
    source: &dyn ReadAt,
    extents: impl IntoIterator<Item = Range<u64>>,
    sink: &mut dyn Sink,
    options: CommitOptions,
) -> Result<Committed> {
    let _ = (source, extents.into_iter().count(), sink, options);
    todo!()
}
