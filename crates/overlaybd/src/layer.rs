//! A sealed layer: opened, verified, and read at physical places. What the device sees is decided by the stack.

use std::sync::Arc;

use uuid::Uuid;

use crate::header::{flags, Header, HEADER_BYTES};
use crate::index::Index;
use crate::io::ReadAt;
use crate::record::{Packed, FIRST_DATA_SECTOR, INVALID_LBA, RECORD_BYTES, SECTOR};
use crate::{Error, Result};

/// The most records that are written into a layer, padding included: whole 256s below the million at which other
/// implementations refuse a layer.
pub const MAX_WRITTEN_RECORDS: usize = 1_000_000 / 256 * 256;
/// The most records that a layer may have to be opened (256 MiB of memory). More than others write: one of them knows no
/// limit.
pub const MAX_RECORDS: u64 = 1 << 24;
/// The largest virtual size in bytes that records can address.
pub const MAX_VIRTUAL_SIZE: u64 = INVALID_LBA * SECTOR;

/// Index bytes that are read at a time, so that a size which is a lie costs no memory.
const CHUNK_BYTES: usize = 1 << 20;

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
    zero_records: usize,
    data_sectors: u64,
}

impl Layer {
    /// Open a sealed LSMT file whose wrappers (tar, ZFile) are removed already. Reads its header, trailer and index,
    /// and verifies that the index is sorted, disjoint and within the data.
    ///
    /// # Errors
    /// [`Error::Format`] for anything that is not a sealed layer or breaks an invariant, [`Error::Limit`] for more
    /// records than memory should hold, [`Error::Io`].
    pub fn open(source: Arc<dyn ReadAt>) -> Result<Self> {
        let length = source.len()?;
        if length < 2 * HEADER_BYTES as u64 {
            return Err(Error::Format(format!(
                "{length} bytes are too few for header and trailer"
            )));
        }
        let header = read_header(source.as_ref(), 0)?;
        if !header.has(flags::HEADER | flags::DATA) {
            return Err(Error::Format(format!(
                "flags {:#x} are not those of a layer's header",
                header.flags
            )));
        }
        let trailer = read_trailer(source.as_ref(), length).map_err(|error| match error {
            // The header is a layer's, so that there are two ways to have come to this.
            Error::Format(reason) if header.has(flags::SEALED) => {
                Error::Format(format!("{reason}; the end is missing or damaged"))
            }
            Error::Format(reason) => Error::Format(format!(
                "{reason}; this is an upper that is not sealed, or its end is missing"
            )),
            other => other,
        })?;
        let variant = if header.has(flags::SEALED) {
            Variant::Committed
        } else {
            Variant::SealedInPlace
        };
        let records = read_index(source.as_ref(), &trailer)?;
        Ok(Self::new(source, trailer, variant, records))
    }

    /// `records` must be those that the trailer speaks of, verified.
    pub(crate) fn new(
        source: Arc<dyn ReadAt>,
        trailer: Header,
        variant: Variant,
        records: Vec<Packed>,
    ) -> Self {
        let zero_records = records.iter().filter(|record| record.zeroed()).count();
        let data_sectors = records
            .iter()
            .filter(|record| !record.zeroed())
            .map(|record| u64::from(record.length()))
            .sum();
        Self {
            source,
            trailer,
            variant,
            index: Arc::new(Index::from_sorted(records)),
            zero_records,
            data_sectors,
        }
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
        self.zero_records
    }

    /// Bytes of the device for which the layer stores data.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.data_sectors * SECTOR
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

/// Read the header at `offset`.
pub(crate) fn read_header(source: &dyn ReadAt, offset: u64) -> Result<Header> {
    let mut bytes = [0; HEADER_BYTES];
    source.read_exact_at(&mut bytes, offset)?;
    Header::decode(&bytes)
}

/// Read and check the trailer of a sealed file of `length` bytes, at least twice a header's.
pub(crate) fn read_trailer(source: &dyn ReadAt, length: u64) -> Result<Header> {
    let end = length - HEADER_BYTES as u64;
    let trailer = read_header(source, end)?;
    if !trailer.has(flags::DATA | flags::SEALED) || trailer.has(flags::HEADER) {
        return Err(Error::Format(format!(
            "flags {:#x} are not those of a layer's trailer",
            trailer.flags
        )));
    }
    if trailer.virtual_size > MAX_VIRTUAL_SIZE {
        return Err(Error::Limit(format!(
            "a virtual size of {} bytes",
            trailer.virtual_size
        )));
    }
    let fits = trailer.index_offset >= FIRST_DATA_SECTOR * SECTOR
        && trailer
            .index_size
            .checked_mul(RECORD_BYTES as u64)
            .and_then(|bytes| bytes.checked_add(trailer.index_offset))
            .is_some_and(|index_end| index_end <= end);
    if !fits {
        return Err(Error::Format(format!(
            "an index of {} records at byte {} does not fit before the trailer at byte {end}",
            trailer.index_size, trailer.index_offset
        )));
    }
    if trailer.index_size > MAX_RECORDS {
        return Err(Error::Limit(format!(
            "an index of {} records",
            trailer.index_size
        )));
    }
    Ok(trailer)
}

fn read_index(source: &dyn ReadAt, trailer: &Header) -> Result<Vec<Packed>> {
    let data_end = trailer.index_offset / SECTOR;
    let mut offset = trailer.index_offset;
    let end = offset + trailer.index_size * RECORD_BYTES as u64;
    let mut records = Vec::new();
    let mut position = 0;
    let mut chunk = Vec::new();
    while offset < end {
        let bytes = (end - offset).min(CHUNK_BYTES as u64);
        chunk.resize(bytes as usize, 0);
        source.read_exact_at(&mut chunk, offset)?;
        for record in Packed::all(&chunk) {
            if record.is_padding() {
                continue;
            }
            verify(record, position, data_end)?;
            position = record.end();
            records.push(record.with_tag(0));
        }
        offset += bytes;
    }
    records.shrink_to_fit();
    Ok(records)
}

fn verify(record: Packed, position: u64, data_end: u64) -> Result<()> {
    let fault = if record.lba() < position {
        "overlaps the record before it or is out of order"
    } else if record.end() > INVALID_LBA {
        "reaches beyond the last sector"
    } else if record.physical() < FIRST_DATA_SECTOR || record.unpack().physical_end() > data_end {
        "lies outside of the data"
    } else {
        return Ok(());
    };
    Err(Error::Format(format!(
        "an index record {fault}: {:?}",
        record.unpack()
    )))
}
