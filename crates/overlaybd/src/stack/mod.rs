//! A device made of layers: sealed lowers and, if it can be written, an upper. Thread-safe throughout. It must not know
//! how the device is exported, nor name or delete files.

mod lowers;

pub use lowers::{Lowers, MAX_LAYERS};

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::layer::Layer;
use crate::upper::{Mode, Upper};
use crate::Result;

/// What a part of the device consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Stored in some layer.
    Data,
    /// Zeros, because a layer says so.
    Zero,
    /// Zeros, because no layer says anything.
    Hole,
}

/// A part of the device of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// What it consists of.
    pub kind: ExtentKind,
}

/// The outcome of [`Stack::restack`].
pub struct Restacked {
    /// What was the upper, sealed; all of it is on stable storage. The topmost of the stack's lowers now.
    pub layer: Arc<Layer>,
    /// How long writers had to wait.
    pub paused: Duration,
}

/// Numbers of a stack at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    /// Lowers, and the upper if there is one.
    pub depth: usize,
    /// Records of the merged index of the lowers.
    pub merged_records: usize,
    /// Records that the upper has in memory; 0 without upper.
    pub upper_records: usize,
    /// Bytes of the device that the upper holds.
    pub upper_data_bytes: u64,
    /// Length of the upper's data file in bytes, with holes and what is overwritten.
    pub upper_file_bytes: u64,
    /// How the upper stores, if there is one.
    pub upper_mode: Option<Mode>,
}

/// A device. All offsets and lengths are in bytes and multiples of 512; a request must end within
/// [`Stack::virtual_size`].
pub struct Stack {
    _private: (),
}

impl Stack {
    /// Put an upper, or nothing, on lowers. An upper of size 0 takes the lowers' size, and writes that down.
    ///
    /// # Errors
    /// [`crate::Error::Io`] when the size could not be written, [`crate::Error::Limit`].
    pub fn open(lowers: Arc<Lowers>, upper: Option<Upper>) -> Result<Self> {
        let _ = (lowers, upper);
        todo!()
    }

    /// Size of the device in bytes.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        todo!()
    }

    /// How many layers there are, the upper included.
    #[must_use]
    pub fn depth(&self) -> usize {
        todo!()
    }

    /// Whether there is no upper.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        todo!()
    }

    /// The sealed layers of this moment.
    #[must_use]
    pub fn lowers(&self) -> Arc<Lowers> {
        todo!()
    }

    /// Fill the buffer from `offset`.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when unaligned or out of range, [`crate::Error::Io`].
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let _ = (buffer, offset);
        todo!()
    }

    /// Like [`Stack::read_at`], but only when it needs no wait for a disk: `false` when it would, and then the content
    /// of the buffer is unspecified.
    ///
    /// # Errors
    /// As [`Stack::read_at`].
    pub fn try_read_at(&self, buffer: &mut [u8], offset: u64) -> Result<bool> {
        let _ = (buffer, offset);
        todo!()
    }

    /// Write to the upper. After an error any part of the range may be written.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when unaligned, out of range, or read-only; [`crate::Error::Io`], in which
    /// [`crate::Error::is_out_of_space`] tells that it will work again when there is room.
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let _ = (data, offset);
        todo!()
    }

    /// Make a range read as zeros and give its space back where the upper holds it. Only sectors that would not read as
    /// zeros already are recorded.
    ///
    /// # Errors
    /// As [`Stack::write_at`].
    pub fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let _ = (offset, length);
        todo!()
    }

    /// Make a range read as zeros. The same as [`Stack::discard`].
    ///
    /// # Errors
    /// As [`Stack::write_at`].
    pub fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        self.discard(offset, length)
    }

    /// Return when all writes that have returned are on stable storage.
    ///
    /// # Errors
    /// [`crate::Error::Io`]. A read-only stack has nothing to do.
    pub fn flush(&self) -> Result<()> {
        todo!()
    }

    /// Grow the device to `virtual_size` bytes; that is on stable storage when the call returns.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when it would shrink, is unaligned, or there is no upper; [`crate::Error::Limit`] beyond
    /// what the format can express; [`crate::Error::Io`].
    pub fn resize(&self, virtual_size: u64) -> Result<()> {
        let _ = virtual_size;
        todo!()
    }

    /// What a range of bytes consists of: extents in order that tile it, no two neighbours of one kind.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when unaligned or out of range.
    pub fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>> {
        let _ = range;
        todo!()
    }

    /// Seal the upper in place and go on with a fresh one on top of it, at one moment for every reader and writer. The
    /// fresh upper gets the stack's size, and the sealed one as its parent. Takes time by the number of records, not by
    /// the amount of data. The sealed layer, and the fresh upper's headers, are on stable storage when the call returns;
    /// the old upper's index file is not needed any more then.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] without upper, [`crate::Error::Limit`] when there are too many layers or records,
    /// [`crate::Error::Io`]. The stack goes on with its old upper then, and the fresh one is dropped. One exception: when
    /// the disk fails to make the sealed layer durable after the switch, flushes fail from then on.
    pub fn restack(&self, fresh: Upper) -> Result<Restacked> {
        let _ = fresh;
        todo!()
    }

    /// Seal the upper in place; the device is read-only afterwards.
    ///
    /// # Errors
    /// As [`Stack::restack`].
    pub fn seal(&self) -> Result<Restacked> {
        todo!()
    }

    /// Put `layer` in the place of `count` neighbouring lowers from `first` (0 at the bottom). It must hold what they
    /// hold together (see [`crate::commit::merge`]); that is the caller's word.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when there are no such lowers, [`crate::Error::Limit`].
    pub fn replace_lowers(&self, first: usize, count: usize, layer: Arc<Layer>) -> Result<()> {
        let _ = (first, count, layer);
        todo!()
    }

    /// Numbers of this moment.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        todo!()
    }
}
