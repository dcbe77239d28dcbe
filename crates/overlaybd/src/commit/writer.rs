//! Writes one committed layer from pieces in ascending order: header, packed data, index, trailer.

use uuid::Uuid;

use crate::header::{flags, Header, HEADER_BYTES};
use crate::layer::{MAX_VIRTUAL_SIZE, MAX_WRITTEN_RECORDS};
use crate::record::{Packed, FIRST_DATA_SECTOR, MAX_WRITTEN_LENGTH, PADDING, RECORD_BYTES, SECTOR};
use crate::{Error, Result};

/// Sectors of a block whose zeros are not stored.
pub(super) const BLOCK_SECTORS: u64 = 8;
/// Records to whose multiple an index is padded.
const PADDED_RECORDS: usize = 256;
static ZEROES: [u8; 65536] = [0; 65536];

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
    header: Header,
    keep_zeroes: bool,
    records: Vec<Packed>,
    zero_records: u64,
    /// First sector of the device that was not given yet.
    position: u64,
    /// Sector of the file at which the next data goes.
    physical: u64,
    max_records: usize,
}

impl<'a> LayerWriter<'a> {
    /// Begin a layer; [`CommitOptions::virtual_size`] must be given.
    ///
    /// # Errors
    /// [`Error::Invalid`] without size, [`Error::Limit`] for one that the format cannot express, or what the sink
    /// returns.
    pub fn new(sink: &'a mut dyn Sink, options: CommitOptions) -> Result<Self> {
        let virtual_size = options.virtual_size.ok_or_else(|| {
            Error::Invalid("a layer cannot be written without a virtual size".into())
        })?;
        if virtual_size > MAX_VIRTUAL_SIZE {
            return Err(Error::Limit(format!(
                "a virtual size of {virtual_size} bytes"
            )));
        }
        let header = Header {
            flags: flags::HEADER | flags::DATA | flags::SEALED,
            index_offset: 0,
            index_size: 0,
            virtual_size,
            uuid: options.uuid.unwrap_or_else(Uuid::new_v4),
            parent_uuid: options.parent_uuid,
            user_tag: options.user_tag,
        };
        sink.write_all(&header.encode()?)?;
        Ok(Self {
            sink,
            header,
            keep_zeroes: options.keep_zeroes,
            records: Vec::new(),
            zero_records: 0,
            position: 0,
            physical: FIRST_DATA_SECTOR,
            max_records: MAX_WRITTEN_RECORDS,
        })
    }

    /// Add data. Blocks of 4 KiB (aligned on the device) that are all zeros are not stored; only blocks that lie within
    /// one call are seen.
    ///
    /// # Errors
    /// [`Error::Invalid`] when unaligned or out of order, [`Error::Limit`] for too many records, or what the sink
    /// returns.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let (lba, _) = self.accept(offset, data.len() as u64)?;
        let mut run = 0;
        let mut at = 0;
        let mut run_is_zero = false;
        while at < data.len() {
            let sector = lba + at as u64 / SECTOR;
            let to_boundary = (BLOCK_SECTORS - sector % BLOCK_SECTORS) * SECTOR;
            let end = data.len().min(at + to_boundary as usize);
            let whole = end - at == (BLOCK_SECTORS * SECTOR) as usize;
            let zero = whole && self.bridge() == 0 && is_zero(&data[at..end]);
            if zero != run_is_zero {
                self.put(lba + run as u64 / SECTOR, &data[run..at], run_is_zero)?;
                run = at;
                run_is_zero = zero;
            }
            at = end;
        }
        self.put(lba + run as u64 / SECTOR, &data[run..], run_is_zero)
    }

    /// Add zeros: recorded with [`CommitOptions::keep_zeroes`], otherwise nothing.
    ///
    /// # Errors
    /// As [`LayerWriter::write`].
    pub fn write_zeroes(&mut self, offset: u64, length: u64) -> Result<()> {
        let (lba, sectors) = self.accept(offset, length)?;
        if !self.keep_zeroes {
            return Ok(());
        }
        if sectors <= self.bridge()
            && self
                .records
                .last()
                .is_some_and(|last| !last.zeroed() && last.end() == lba)
        {
            return self.put_zero_data(lba, sectors);
        }
        self.record(lba, sectors, true)
    }

    /// Write index and trailer. Without this call the output is no layer.
    ///
    /// # Errors
    /// As [`LayerWriter::write`].
    pub fn finish(mut self) -> Result<Committed> {
        let index_offset = self.physical * SECTOR;
        let padded = self.records.len().next_multiple_of(PADDED_RECORDS);
        for chunk in self.records.chunks(PADDED_RECORDS * 16) {
            let bytes: Vec<u8> = chunk.iter().flat_map(|record| record.to_bytes()).collect();
            self.sink.write_all(&bytes)?;
        }
        self.sink
            .write_all(&PADDING.repeat(padded - self.records.len()))?;
        let index_end = index_offset + (padded * RECORD_BYTES) as u64;
        let trailer_offset = index_end.next_multiple_of(HEADER_BYTES as u64);
        self.sink
            .write_all(&ZEROES[..(trailer_offset - index_end) as usize])?;
        self.header.flags &= !flags::HEADER;
        self.header.index_offset = index_offset;
        self.header.index_size = padded as u64;
        self.sink.write_all(&self.header.encode()?)?;
        Ok(Committed {
            uuid: self.header.uuid,
            records: self.records.len() as u64,
            zero_records: self.zero_records,
            data_bytes: (self.physical - FIRST_DATA_SECTOR) * SECTOR,
            virtual_size: self.header.virtual_size,
            file_bytes: trailer_offset + HEADER_BYTES as u64,
        })
    }

    /// First sector and count of a valid piece.
    fn accept(&mut self, offset: u64, length: u64) -> Result<(u64, u64)> {
        let end = offset.checked_add(length);
        let limit = match self.header.virtual_size {
            0 => MAX_VIRTUAL_SIZE, // the layer below decides
            size => size,
        };
        let valid = offset % SECTOR == 0
            && length % SECTOR == 0
            && offset >= self.position * SECTOR
            && end.is_some_and(|end| end <= limit.next_multiple_of(SECTOR));
        if !valid {
            return Err(Error::Invalid(format!(
                "{length} bytes at {offset} in a layer of {} bytes that is written up to {}",
                self.header.virtual_size,
                self.position * SECTOR
            )));
        }
        self.position = (offset + length) / SECTOR;
        Ok((offset / SECTOR, length / SECTOR))
    }

    fn put(&mut self, lba: u64, data: &[u8], zero: bool) -> Result<()> {
        let sectors = data.len() as u64 / SECTOR;
        if sectors == 0 || (zero && !self.keep_zeroes) {
            return Ok(());
        }
        if zero {
            return self.record(lba, sectors, true);
        }
        let end = self.records.last().map_or(lba, |last| last.end());
        if !self.keep_zeroes && lba > end && lba - end <= self.bridge() {
            self.put_zero_data(end, lba - end)?;
        }
        self.record(lba, sectors, false)?;
        self.sink.write_all(data)
    }

    fn put_zero_data(&mut self, lba: u64, sectors: u64) -> Result<()> {
        self.record(lba, sectors, false)?;
        let mut rest = sectors * SECTOR;
        while rest > 0 {
            let length = rest.min(ZEROES.len() as u64);
            self.sink.write_all(&ZEROES[..length as usize])?;
            rest -= length;
        }
        Ok(())
    }

    /// Add a run to the index. It continues the last record as far as that can grow.
    fn record(&mut self, lba: u64, sectors: u64, zeroed: bool) -> Result<()> {
        let mut lba = lba;
        let end = lba + sectors;
        while lba < end {
            let mut length = (end - lba).min(u64::from(MAX_WRITTEN_LENGTH)) as u32;
            let physical = self.physical;
            match self.records.last_mut() {
                Some(last)
                    if last.end() == lba
                        && last.zeroed() == zeroed
                        && last.unpack().physical_end() == physical
                        && last.length() < MAX_WRITTEN_LENGTH =>
                {
                    length = length.min(MAX_WRITTEN_LENGTH - last.length());
                    *last = Packed::new_unchecked(
                        last.lba(),
                        last.length() + length,
                        last.physical(),
                        zeroed,
                        0,
                    );
                }
                _ => {
                    if self.records.len() == self.max_records {
                        return Err(Error::Limit(format!(
                            "a layer has at most {} records",
                            self.max_records
                        )));
                    }
                    self.records
                        .push(Packed::new_unchecked(lba, length, physical, zeroed, 0));
                    self.zero_records += u64::from(zeroed);
                }
            }
            if !zeroed {
                self.physical += u64::from(length);
            }
            lba += u64::from(length);
        }
        Ok(())
    }

    /// Up to how many sectors of zeros are stored as data to save a record: none at first, more the closer the limit is.
    fn bridge(&self) -> u64 {
        let eighths = self.records.len() * 8 / self.max_records;
        match eighths {
            0..4 => 0,
            4..6 => 128,
            6 => 2048,
            _ => 16384,
        }
    }
}

fn is_zero(block: &[u8]) -> bool {
    block
        .chunks(64)
        .all(|line| line.iter().fold(0, |bits, byte| bits | byte) == 0)
}
