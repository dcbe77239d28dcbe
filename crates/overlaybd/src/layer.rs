//! A sealed layer: opened, verified, and read at physical places. What the device sees is decided by the stack.

use std::sync::Arc;

use uuid::Uuid;

use crate::header::Header;
use crate::index::Index;
use crate::io::ReadAt;
use crate::Result;

/// The two forms of a sealed layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Written as a whole: data densely packed in the order of the device.
    Committed,
    /// An upper that got an index and a trailer at its end.
    SealedInPlace,
}

impl Variant {
    /// `committed` or `sealed`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Committed => "committed",
            Self::SealedInPlace => "sealed",
        }
    }
}

/// An immutable layer with its index in memory. Cheap to share; reads need no lock.
pub struct Layer {
    source: Arc<dyn ReadAt>,
    trailer: Header,
    variant: Variant,
    index: Arc<Index>,
}

impl Layer {
    /// Open a sealed LSMT file whose wrappers (tar, ZFile) are removed already. Reads its header, trailer and index,
    /// and verifies that the index is sorted, disjoint and within the data.
    ///
    /// # Errors
    /// [`crate::Error::Format`] for anything that is not a sealed layer or breaks an invariant, [`crate::Error::Limit`]
    /// for more records than memory should hold, [`crate::Error::Io`].
    pub fn open(source: Arc<dyn ReadAt>) -> Result<Self> {
        let _ = source;
        todo!()
    }

    /// Identity of the layer; nil when it has none.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.trailer.uuid
    }

    /// The layer that it was made on top of.
    #[must_use]
    pub fn parent_uuid(&self) -> Option<Uuid> {
        self.trailer.parent_uuid
    }

    /// Size of the device in bytes; 0 when the layer leaves that to the one below.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        self.trailer.virtual_size
    }

    /// How many valid records the index has, padding not counted.
    #[must_use]
    pub fn records(&self) -> usize {
        self.index.len()
    }

    /// How many of the records are zeroed runs.
    #[must_use]
    pub fn zero_records(&self) -> usize {
        todo!()
    }

    /// Bytes of the device for which the layer stores data.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        todo!()
    }

    /// How the layer was made.
    #[must_use]
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// The flags of the trailer.
    #[must_use]
    pub fn flags(&self) -> u32 {
        self.trailer.flags
    }

    /// All that the trailer says.
    #[must_use]
    pub fn trailer(&self) -> &Header {
        &self.trailer
    }

    /// The records of this layer alone.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// The bytes of the layer file.
    #[must_use]
    pub fn source(&self) -> &Arc<dyn ReadAt> {
        &self.source
    }
}
