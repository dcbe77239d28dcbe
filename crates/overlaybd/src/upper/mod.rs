//! The writable layer on top of a stack: append-only, hybrid or sparse. It knows its own sectors only; what lies below,
//! and who may write when, is the stack's.

use uuid::Uuid;

use crate::io::{ReadAt, WriteAt};
use crate::Result;

/// How an upper stores what is written again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Every write is appended: a log. Data and index file.
    Append,
    /// The first write of a sector is appended, later ones overwrite it in place. Data and index file.
    Hybrid,
    /// Every sector has its fixed place in one sparse file. No index file; zeroed runs are forgotten when it is opened
    /// again, so it must not be opened again on top of other layers.
    Sparse,
}

/// What a new upper is.
#[derive(Debug, Clone)]
pub struct UpperOptions {
    /// How it stores.
    pub mode: Mode,
    /// Size of the device in bytes, a multiple of 512. 0: that of the lowers that it is put on.
    pub virtual_size: u64,
    /// Identity; random when missing.
    pub uuid: Option<Uuid>,
    /// The layer that it is put on. [`crate::stack::Stack::restack`] fills it in when missing.
    pub parent_uuid: Option<Uuid>,
    /// Free text, at most 256 bytes.
    pub user_tag: Vec<u8>,
}

/// A writable layer: one or two open files and the index in memory.
pub struct Upper {
    mode: Mode,
}

impl Upper {
    /// Write the headers of a new upper into empty files. Nothing is synced: what was never flushed may be gone, its
    /// headers too, after a crash of the host.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when a file is not empty, the size is unaligned, or the index file is missing (or
    /// there, for a sparse upper); [`crate::Error::Limit`] for a size that the format cannot express;
    /// [`crate::Error::Io`].
    pub fn create(
        data: Box<dyn WriteAt>,
        index: Option<Box<dyn WriteAt>>,
        options: UpperOptions,
    ) -> Result<Self> {
        let _ = (data, index, options);
        todo!()
    }

    /// Open an upper, whatever a crash left of it: incomplete and dangling records at the end of the index file, and
    /// incomplete sectors at the end of the data, are cut off. An index that a seal began to append is ignored.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when it is sealed (see [`Upper::is_sealed`]), [`crate::Error::Format`] when a header is
    /// no upper's or the two files are not of one upper, [`crate::Error::Limit`], [`crate::Error::Io`].
    pub fn open(data: Box<dyn WriteAt>, index: Option<Box<dyn WriteAt>>) -> Result<Self> {
        let _ = (data, index);
        todo!()
    }

    /// Whether the data file of an upper ends in its own valid trailer: then it is a layer, to be opened by
    /// [`crate::layer::Layer::open`], and a restack or seal that was interrupted had got so far.
    ///
    /// # Errors
    /// [`crate::Error::Format`] when it is no data file of an upper, [`crate::Error::Io`].
    pub fn is_sealed(data: &dyn ReadAt) -> Result<bool> {
        let _ = data;
        todo!()
    }

    /// How it stores.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Identity.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        todo!()
    }

    /// The layer that it was put on.
    #[must_use]
    pub fn parent_uuid(&self) -> Option<Uuid> {
        todo!()
    }

    /// Size of the device in bytes, 0 when it leaves that to the lowers.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        todo!()
    }

    /// How many records it would have if it were sealed now (neighbours that fuse count once).
    #[must_use]
    pub fn records(&self) -> usize {
        todo!()
    }

    /// Bytes of the device for which it holds data.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        todo!()
    }

    /// Return when everything whose write has returned is on stable storage: data first, then index.
    ///
    /// # Errors
    /// [`crate::Error::Io`].
    pub fn flush(&self) -> Result<()> {
        todo!()
    }
}
