//! What an export serves: a block device as NBD, ublk and kernel NBD see it.
//!
//! Exports know nothing of layers; whoever implements [`BlockBackend`] knows nothing of wire formats.

use std::io;

/// Every offset and length is a multiple of this many bytes.
pub const SECTOR: u64 = 512;

/// What a range of a device holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Bytes are stored.
    Data,
    /// Recorded as zeros; nothing is stored.
    Zero,
    /// No layer has anything here; reads as zeros.
    Hole,
}

/// A run of equal content, following the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Bytes.
    pub length: u64,
    /// What they hold.
    pub content: Content,
}

/// A block device. All methods may be called by any number of threads at once.
///
/// Offsets and lengths are bytes and multiples of [`SECTOR`]; otherwise, and beyond [`BlockBackend::size`], the error is
/// `InvalidInput`. Writes to a read-only device fail with `PermissionDenied`, a full file system is `StorageFull`.
pub trait BlockBackend: Send + Sync + 'static {
    /// Bytes; grows only.
    fn size(&self) -> u64;

    /// Whether writes are refused. Turns from `false` to `true` when the device is sealed.
    fn is_read_only(&self) -> bool;

    /// Fill the buffer; may wait for a disk.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Fill the buffer if that needs no wait for a disk; `false` when it does, and then its content is unspecified.
    fn try_read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool>;

    /// Write the buffer. It is on stable storage after the next [`BlockBackend::flush`].
    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<()>;

    /// The range is no longer needed; it reads as zeros afterwards.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;

    /// The range reads as zeros afterwards. With `allocate`, later writes there should need no new room.
    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool) -> io::Result<()>;

    /// Return when every write that was complete before is on stable storage.
    fn flush(&self) -> io::Result<()>;

    /// What the range holds, from its begin on: at most `limit` extents, at least one.
    fn extents(&self, offset: u64, length: u64, limit: usize) -> io::Result<Vec<Extent>>;

    /// A request begins; called by exports so that statistics know what is in flight.
    fn request_started(&self) {}

    /// The request that [`BlockBackend::request_started`] announced is answered.
    fn request_finished(&self) {}
}
