//! One index record: which sectors of the device lie where in a layer. Encoding only, no search and no merging.

use crate::{Error, Result};

/// Bytes of a sector, the unit of every address in a record.
pub const SECTOR: u64 = 512;
/// Bytes of an encoded record.
pub const RECORD_BYTES: usize = 16;
/// The longest record that the format can express, in sectors.
pub const MAX_LENGTH: u32 = (1 << 14) - 1;
/// The longest record that this crate writes, in sectors: whole 4 KiB blocks, and below the limit at which the other
/// implementations stop fusing neighbours.
pub const MAX_WRITTEN_LENGTH: u32 = 16_376;
/// First sector of a layer file that holds data; the header lies before it.
pub const FIRST_DATA_SECTOR: u64 = 8;
/// The LBA of padding. No valid record begins here or reaches beyond.
pub const INVALID_LBA: u64 = (1 << 50) - 1;
/// The highest physical sector that the format can express.
pub const MAX_PHYSICAL: u64 = (1 << 55) - 1;
/// The record that pads an index to whole 4096 bytes.
pub const PADDING: [u8; RECORD_BYTES] = [
    0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x03, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

const ZEROED: u64 = 1 << 55;

/// A run of sectors of the device, and where a layer holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// First sector of the device.
    pub lba: u64,
    /// Sectors, 1 to [`MAX_LENGTH`].
    pub length: u32,
    /// First sector in the layer file, header included, wrappers removed. In range, but without meaning, when `zeroed`.
    pub physical: u64,
    /// The run reads as zeros and no data is stored.
    pub zeroed: bool,
    /// On disk 0, or what another writer left; in memory the number of the layer in its stack, 0 at the bottom.
    pub tag: u8,
}

impl Record {
    /// The first sector of the device behind the run.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.lba + u64::from(self.length)
    }

    /// The first sector of the layer file behind the stored data; `physical` itself when nothing is stored.
    #[must_use]
    pub fn physical_end(&self) -> u64 {
        if self.zeroed {
            self.physical
        } else {
            self.physical + u64::from(self.length)
        }
    }

    /// The 16 bytes of the record in a file.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a field exceeds its width; nothing is ever masked.
    pub fn encode(&self) -> Result<[u8; RECORD_BYTES]> {
        Packed::new(self).map(Packed::to_bytes)
    }

    /// Read a record from a file; `None` for padding, which is any record without length or at the padding's LBA.
    #[must_use]
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let packed = Packed::from_bytes(bytes);
        (!packed.is_padding()).then(|| packed.unpack())
    }
}

/// A record in the 16 bytes that it takes in a file: what indexes keep in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packed {
    low: u64,
    high: u64,
}

impl Packed {
    pub(crate) fn new(record: &Record) -> Result<Self> {
        let fits = record.length >= 1
            && record.length <= MAX_LENGTH
            && record.lba < INVALID_LBA
            && record.end() <= INVALID_LBA
            && record.physical <= MAX_PHYSICAL;
        if !fits {
            return Err(Error::Invalid(format!(
                "a record's field exceeds its width: {record:?}"
            )));
        }
        Ok(Self::new_unchecked(
            record.lba,
            record.length,
            record.physical,
            record.zeroed,
            record.tag,
        ))
    }

    /// For fields that are known to fit, being parts of a record that did.
    pub(crate) fn new_unchecked(
        lba: u64,
        length: u32,
        physical: u64,
        zeroed: bool,
        tag: u8,
    ) -> Self {
        let zeroed = if zeroed { ZEROED } else { 0 };
        Self {
            low: lba | u64::from(length) << 50,
            high: physical | zeroed | u64::from(tag) << 56,
        }
    }

    pub(crate) fn from_bytes(bytes: &[u8; RECORD_BYTES]) -> Self {
        let value = u128::from_le_bytes(*bytes);
        Self {
            low: value as u64,
            high: (value >> 64) as u64,
        }
    }

    /// All records of a piece of an index file; its length must be a multiple of 16.
    pub(crate) fn all(bytes: &[u8]) -> impl Iterator<Item = Self> + '_ {
        bytes.chunks_exact(RECORD_BYTES).map(|bytes| {
            let mut record = [0; RECORD_BYTES];
            record.copy_from_slice(bytes);
            Self::from_bytes(&record)
        })
    }

    pub(crate) fn to_bytes(self) -> [u8; RECORD_BYTES] {
        (u128::from(self.high) << 64 | u128::from(self.low)).to_le_bytes()
    }

    pub(crate) fn is_padding(self) -> bool {
        self.lba() == INVALID_LBA || self.length() == 0
    }

    pub(crate) fn lba(self) -> u64 {
        self.low & INVALID_LBA
    }

    pub(crate) fn length(self) -> u32 {
        (self.low >> 50) as u32
    }

    pub(crate) fn end(self) -> u64 {
        self.lba() + (self.low >> 50)
    }

    pub(crate) fn physical(self) -> u64 {
        self.high & MAX_PHYSICAL
    }

    pub(crate) fn zeroed(self) -> bool {
        self.high & ZEROED != 0
    }

    pub(crate) fn tag(self) -> u8 {
        (self.high >> 56) as u8
    }

    pub(crate) fn with_tag(self, tag: u8) -> Self {
        Self {
            low: self.low,
            high: self.high & ((1 << 56) - 1) | u64::from(tag) << 56,
        }
    }

    /// The part of the record within `[from, to)`, which must meet it.
    pub(crate) fn clip(self, from: u64, to: u64) -> Self {
        let start = self.lba().max(from);
        let end = self.end().min(to);
        let skipped = if self.zeroed() { 0 } else { start - self.lba() };
        Self {
            low: start | (end - start) << 50,
            high: self.high + skipped,
        }
    }

    pub(crate) fn unpack(self) -> Record {
        Record {
            lba: self.lba(),
            length: self.length(),
            physical: self.physical(),
            zeroed: self.zeroed(),
            tag: self.tag(),
        }
    }
}
