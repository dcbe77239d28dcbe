//! Writes one committed layer from pieces in ascending order: header, packed data, index, trailer.

use uuid::Uuid;

use crate::Result;

/// Where a layer is written: bytes in order, so that it can be hashed or compressed on the way. Everything that
/// implements [`std::io::Write`] is one.
pub trait Sink {
    /// Take all bytes.
    ///
    /// # Errors
    /// Whatever prevents that.
    fn write_all(&mut self, bytes: &[u8]) -> Result<()>;
}

impl<W: std::io::Write + ?Sized> Sink for W {
    fn write_all(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(std::io::Write::write_all(self, bytes)?)
    }
}

/// What a committed layer is.
#[derive(Debug, Clone, Default)]
pub struct CommitOptions {
    /// Identity; random when missing.
    pub uuid: Option<Uuid>,
    /// The layer that this one is made for lying on.
    pub parent_uuid: Option<Uuid>,
    /// Free text, at most 256 bytes.
    pub user_tag: Vec<u8>,
    /// Size of the device in bytes; when missing, that of what is committed.
    pub virtual_size: Option<u64>,
    /// `true` when other layers will lie below: zeros are then recorded so that those do not show through. At the bottom
    /// of a stack (`false`) nothing is stored for them.
    pub keep_zeroes: bool,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// Identity of the layer.
    pub uuid: Uuid,
    /// Records of the index, padding not counted.
    pub records: u64,
    /// How many of them are zeroed runs.
    pub zero_records: u64,
    /// Bytes of data stored.
    pub data_bytes: u64,
    /// Size of the device in bytes.
    pub virtual_size: u64,
    /// Length of the layer file in bytes.
    pub file_bytes: u64,
}

/// Writes one committed layer. Offsets and lengths are in bytes and multiples of 512; pieces come in ascending order and
/// must not overlap.
pub struct LayerWriter<'a> {
    sink: &'a mut dyn Sink,
}

impl<'a> LayerWriter<'a> {
    /// Begin a layer; [`CommitOptions::virtual_size`] must be given.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] without size, or what the sink returns.
    pub fn new(sink: &'a mut dyn Sink, options: CommitOptions) -> Result<Self> {
        let _ = options;
        sink.write_all(&[])?;
        todo!()
    }

    /// Add data. Blocks of 4 KiB (aligned on the device) that are all zeros are not stored; only blocks that lie within
    /// one call are seen.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when unaligned or out of order, [`crate::Error::Limit`] for too many records, or what
    /// the sink returns.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let _ = (offset, data, &self.sink);
        todo!()
    }

    /// Add zeros: recorded with [`CommitOptions::keep_zeroes`], otherwise nothing.
    ///
    /// # Errors
    /// As [`LayerWriter::write`].
    pub fn write_zeroes(&mut self, offset: u64, length: u64) -> Result<()> {
        let _ = (offset, length);
        todo!()
    }

    /// Write index and trailer. Without this call the output is no layer.
    ///
    /// # Errors
    /// As [`LayerWriter::write`].
    pub fn finish(self) -> Result<Committed> {
        todo!()
    }
}
