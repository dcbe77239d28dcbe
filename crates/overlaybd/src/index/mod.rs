//! A flat, sorted index of records with a fast search. Immutable; the upper's changing index is elsewhere.

mod overlay;
mod search;

pub(crate) use overlay::merge;

use crate::record::{Packed, Record};
use search::Fences;

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
    fences: Fences,
}

impl Index {
    /// `records` must be sorted and must not overlap.
    pub(crate) fn from_sorted(records: Vec<Packed>) -> Self {
        let fences = Fences::new(&records);
        Self { records, fences }
    }

    /// An index of records in any order; where they overlap, the later one counts.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when a field of a record exceeds its width.
    pub fn from_records(records: impl IntoIterator<Item = Record>) -> crate::Result<Self> {
        let mut levels = Vec::new();
        for record in records {
            levels.push(vec![Packed::new(&record)?]);
        }
        let levels: Vec<&[Packed]> = levels.iter().map(Vec::as_slice).collect();
        Ok(Self::from_sorted(merge(&levels)))
    }

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

    pub(crate) fn packed(&self) -> &[Packed] {
        &self.records
    }

    /// The pieces that tile `sectors` sectors from `lba`, in order, holes included. O(log n) for the first, O(1) for
    /// each further one, no allocation.
    #[must_use]
    pub fn pieces(&self, lba: u64, sectors: u64) -> Pieces<'_> {
        let position = match self.fences.predecessor(&self.records, lba) {
            Some(found) if self.records[found].end() > lba => found,
            Some(found) => found + 1,
            None => 0,
        };
        Pieces {
            records: &self.records[position..],
            lba,
            end: lba.saturating_add(sectors),
        }
    }
}

/// See [`Index::pieces`].
pub struct Pieces<'a> {
    /// Begins with the first record that ends behind `lba`.
    records: &'a [Packed],
    lba: u64,
    end: u64,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.lba >= self.end {
            return None;
        }
        let lba = self.lba;
        let (until, place) = match self.records.first() {
            Some(record) if record.lba() <= lba => {
                let until = record.end();
                if until <= self.end {
                    self.records = &self.records[1..];
                }
                let place = if record.zeroed() {
                    Place::Zero
                } else {
                    Place::Data {
                        tag: record.tag(),
                        physical: record.physical() + (lba - record.lba()),
                    }
                };
                (until, place)
            }
            Some(record) => (record.lba(), Place::Hole),
            None => (self.end, Place::Hole),
        };
        self.lba = until.min(self.end);
        Some(Piece {
            lba,
            length: self.lba - lba,
            place,
        })
    }
}
