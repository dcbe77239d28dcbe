//! Opening an upper, whatever a crash left of it. It repairs the ends of files, never their middle.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, RwLock};

use super::map::Map;
use super::{DataFile, Log, Mode, Upper};
use crate::header::{flags, Header, HEADER_BYTES, VIRTUAL_SIZE_AT};
use crate::io::{ReadAt, WriteAt};
use crate::layer::{read_header, read_trailer, MAX_VIRTUAL_SIZE};
use crate::record::{
    Packed, FIRST_DATA_SECTOR, INVALID_LBA, MAX_WRITTEN_LENGTH, RECORD_BYTES, SECTOR,
};
use crate::{Error, Result};

/// Records of an index file beyond which nobody opens it.
const MAX_LOG_RECORDS: u64 = 128_000_000;
/// Index bytes that are read at a time.
const CHUNK_BYTES: u64 = 1 << 20;

impl Upper {
    /// Open an upper, whatever a crash left of it: incomplete and dangling records at the end of the index file, and
    /// incomplete sectors at the end of the data, are cut off. An index that a seal began to append is ignored.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is sealed (see [`Upper::is_sealed`]) or the index file is missing, [`Error::Format`]
    /// when a header is no upper's or the two files are not of one upper, [`Error::Limit`], [`Error::Io`].
    pub fn open(data: Box<dyn WriteAt>, index: Option<Box<dyn WriteAt>>) -> Result<Self> {
        let header = data_header(data.as_ref())?;
        if Self::is_sealed(data.as_ref())? {
            return Err(Error::Invalid(format!(
                "upper {} is sealed: it is a layer now",
                header.uuid
            )));
        }
        if header.virtual_size > MAX_VIRTUAL_SIZE {
            return Err(Error::Limit(format!(
                "a virtual size of {} bytes",
                header.virtual_size
            )));
        }
        let mode = Mode::of(&header);
        let mut map = Map::default();
        let mut data_end = FIRST_DATA_SECTOR;
        let mut log = Log {
            end: HEADER_BYTES as u64,
            torn: false,
            data_end: FIRST_DATA_SECTOR,
        };
        let index = if mode == Mode::Sparse {
            scan(data.as_ref(), &header, &mut map)?;
            None
        } else {
            let index =
                index.ok_or_else(|| Error::Invalid("the upper's index file is missing".into()))?;
            check_index_header(index.as_ref(), &header)?;
            data_end = data.len()? / SECTOR;
            if data.len()? % SECTOR != 0 {
                data.set_len(data_end * SECTOR)?;
            }
            replay(index.as_ref(), data_end, &mut map, &mut log)?;
            Some(index)
        };
        Ok(Self {
            mode,
            uuid: header.uuid,
            parent_uuid: header.parent_uuid,
            user_tag: header.user_tag,
            virtual_size: AtomicU64::new(header.virtual_size),
            reopened: true,
            data: Arc::new(DataFile(data)),
            index,
            allocated: AtomicU64::new(data_end),
            map: RwLock::new(map),
            log: Mutex::new(log),
        })
    }

    /// Whether the data file of an upper ends in its own valid trailer: then it is a layer, to be opened by
    /// [`crate::layer::Layer::open`], and a restack or seal that was interrupted had got so far.
    ///
    /// # Errors
    /// [`Error::Format`] when it is no data file of an upper, [`Error::Io`].
    pub fn is_sealed(data: &dyn ReadAt) -> Result<bool> {
        let header = data_header(data)?;
        let length = data.len()?;
        if length < 2 * HEADER_BYTES as u64 {
            return Ok(false);
        }
        match read_trailer(data, length) {
            // A guest can write what looks like a trailer at the end of the file, but it does not know the identity.
            Ok(trailer) => Ok(trailer.uuid == header.uuid),
            Err(Error::Io(error)) => Err(error.into()),
            Err(_) => Ok(false),
        }
    }
}

fn data_header(data: &dyn ReadAt) -> Result<Header> {
    if data.len()? < HEADER_BYTES as u64 {
        return Err(Error::Format(
            "an upper's data file without a complete header".into(),
        ));
    }
    let header = read_header(data, 0)?;
    if !header.has(flags::HEADER | flags::DATA) || header.has(flags::SEALED) {
        return Err(Error::Format(format!(
            "flags {:#x} are not those of an upper's data file",
            header.flags
        )));
    }
    Ok(header)
}

/// Both headers must be of one upper. The size may differ after a crash during a resize; that in the data file counts.
fn check_index_header(index: &dyn WriteAt, data_header: &Header) -> Result<()> {
    if index.len()? < HEADER_BYTES as u64 {
        return Err(Error::Format(
            "an upper's index file without a complete header".into(),
        ));
    }
    let header = read_header(index, 0)?;
    let valid = header.has(flags::HEADER)
        && !header.has(flags::DATA)
        && !header.has(flags::SEALED)
        && header.index_offset == HEADER_BYTES as u64;
    if !valid {
        return Err(Error::Format(format!(
            "flags {:#x} and index offset {} are not those of an upper's index file",
            header.flags, header.index_offset
        )));
    }
    if header.uuid != data_header.uuid {
        return Err(Error::Format(format!(
            "the index file of upper {} beside the data file of {}",
            header.uuid, data_header.uuid
        )));
    }
    if header.virtual_size != data_header.virtual_size {
        index.write_all_at(
            &data_header.virtual_size.to_le_bytes(),
            VIRTUAL_SIZE_AT as u64,
        )?;
    }
    Ok(())
}

/// Read the records in the order in which they were written, until one refers to data that is not there: from there on
/// nothing was acknowledged as durable.
fn replay(index: &dyn WriteAt, data_end: u64, map: &mut Map, log: &mut Log) -> Result<()> {
    let length = index.len()?;
    let records = (length - HEADER_BYTES as u64) / RECORD_BYTES as u64;
    if records > MAX_LOG_RECORDS {
        return Err(Error::Limit(format!("an index file of {records} records")));
    }
    let end = HEADER_BYTES as u64 + records * RECORD_BYTES as u64;
    let mut chunk = Vec::new();
    'file: while log.end < end {
        let start = log.end;
        chunk.resize((end - start).min(CHUNK_BYTES) as usize, 0);
        index.read_exact_at(&mut chunk, start)?;
        for packed in Packed::all(&chunk) {
            if !packed.is_padding() {
                let record = packed.unpack();
                let intact = record.physical >= FIRST_DATA_SECTOR
                    && record.physical_end() <= data_end
                    && record.end() <= INVALID_LBA;
                if !intact {
                    break 'file;
                }
                log.data_end = log.data_end.max(record.physical_end());
                let physical = (!record.zeroed).then_some(record.physical);
                map.insert(record.lba, record.length, physical, &mut |_| {});
            }
            log.end += RECORD_BYTES as u64;
        }
    }
    if log.end < length {
        // On stable storage before data grows again: otherwise a dangling record would refer to other data one day.
        index.set_len(log.end)?;
        index.sync_data()?;
    }
    Ok(())
}

/// Find the data of a sparse upper by what the file system says.
fn scan(data: &dyn WriteAt, header: &Header, map: &mut Map) -> Result<()> {
    let base = HEADER_BYTES as u64;
    let end =
        (base + header.virtual_size.next_multiple_of(SECTOR)).min(data.len()? / SECTOR * SECTOR);
    if end <= base {
        return Ok(());
    }
    let mut done = base / SECTOR;
    for extent in data.data_extents(base..end)? {
        let extent_end = extent.end.min(end).div_ceil(SECTOR);
        let mut physical = (extent.start / SECTOR).max(done);
        while physical < extent_end {
            let length = (extent_end - physical).min(u64::from(MAX_WRITTEN_LENGTH)) as u32;
            map.insert(
                physical - FIRST_DATA_SECTOR,
                length,
                Some(physical),
                &mut |_| {},
            );
            physical += u64::from(length);
        }
        done = done.max(extent_end);
    }
    Ok(())
}
