//! The writable layer on top of a stack: append-only, hybrid or sparse. It knows its own sectors only; what lies below,
//! and who may write when, is the stack's.

mod map;
mod open;
mod seal;
mod write;

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use uuid::Uuid;

use crate::header::{flags, uuid_text, Header, HEADER_BYTES, PARENT_UUID_AT, VIRTUAL_SIZE_AT};
use crate::index::Piece;
use crate::io::{ReadAt, WriteAt};
use crate::layer::MAX_VIRTUAL_SIZE;
use crate::record::{FIRST_DATA_SECTOR, SECTOR};
use crate::{Error, Result};
use map::Map;

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
    uuid: Uuid,
    parent_uuid: Option<Uuid>,
    user_tag: Vec<u8>,
    virtual_size: AtomicU64,
    /// Opened with its content, not made: a sparse one has forgotten its zeroed runs then.
    reopened: bool,
    data: Arc<DataFile>,
    index: Option<Box<dyn WriteAt>>,
    /// First sector of the data file that no write has got. Unused by sparse uppers.
    allocated: AtomicU64,
    map: RwLock<Map>,
    log: Mutex<Log>,
}

/// The end of the index file. Whoever changes the map holds it, so that map and file have one order.
struct Log {
    /// Bytes of complete records, header included.
    end: u64,
    /// A failed write may have left something behind `end`.
    torn: bool,
    /// The sector behind the last data that a record refers to. The data file is never shorter.
    data_end: u64,
}

/// The data file, which becomes the source of a layer when it is sealed.
struct DataFile(Box<dyn WriteAt>);

impl ReadAt for DataFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn try_read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        self.0.try_read_exact_at(buffer, offset)
    }
}

impl Upper {
    /// Write the headers of a new upper into empty files. Nothing is synced: what was never flushed may be gone, its
    /// headers too, after a crash of the host.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a file is not empty, the size is unaligned, or the index file is missing (or there, for
    /// a sparse upper); [`Error::Limit`] for a size that the format cannot express; [`Error::Io`].
    pub fn create(
        data: Box<dyn WriteAt>,
        index: Option<Box<dyn WriteAt>>,
        options: UpperOptions,
    ) -> Result<Self> {
        check_size(options.virtual_size)?;
        if index.is_some() == (options.mode == Mode::Sparse) {
            return Err(Error::Invalid(
                "a sparse upper has one file, others have a data and an index file".into(),
            ));
        }
        if !data.is_empty()?
            || index
                .as_ref()
                .map_or(Ok(false), |index| index.is_empty().map(|empty| !empty))?
        {
            return Err(Error::Invalid(
                "the files of a new upper must be empty".into(),
            ));
        }
        let mut header = Header {
            flags: flags::HEADER | flags::DATA | options.mode.flag(),
            index_offset: 0,
            index_size: 0,
            virtual_size: options.virtual_size,
            uuid: options.uuid.unwrap_or_else(Uuid::new_v4),
            parent_uuid: options.parent_uuid,
            user_tag: options.user_tag,
        };
        data.write_all_at(&header.encode()?, 0)?;
        if let Some(index) = &index {
            header.flags &= !flags::DATA;
            header.index_offset = HEADER_BYTES as u64;
            index.write_all_at(&header.encode()?, 0)?;
        } else {
            data.set_len(HEADER_BYTES as u64 + options.virtual_size)?;
        }
        Ok(Self {
            mode: options.mode,
            uuid: header.uuid,
            parent_uuid: header.parent_uuid,
            user_tag: header.user_tag,
            virtual_size: AtomicU64::new(options.virtual_size),
            reopened: false,
            data: Arc::new(DataFile(data)),
            index,
            allocated: AtomicU64::new(FIRST_DATA_SECTOR),
            map: RwLock::default(),
            log: Mutex::new(Log {
                end: HEADER_BYTES as u64,
                torn: false,
                data_end: FIRST_DATA_SECTOR,
            }),
        })
    }

    /// How it stores.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Identity.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// The layer that it was put on.
    #[must_use]
    pub fn parent_uuid(&self) -> Option<Uuid> {
        self.parent_uuid
    }

    /// Size of the device in bytes, 0 when it leaves that to the lowers.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size.load(Ordering::Acquire)
    }

    /// How many records it would have if it were sealed now (neighbours that fuse count once).
    #[must_use]
    pub fn records(&self) -> usize {
        self.with_map(Map::len)
    }

    /// How many of the records are zeroed runs. Takes time by their number.
    #[must_use]
    pub fn zero_records(&self) -> usize {
        self.with_map(Map::zero_runs)
    }

    /// Bytes of the device for which it holds data.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.with_map(Map::data_sectors) * SECTOR
    }

    /// Length of the data file in bytes, holes and overwritten data included.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.data_end() * SECTOR
    }

    /// Return when everything whose write has returned is on stable storage: data first, then index.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn flush(&self) -> Result<()> {
        self.data.0.sync_data()?;
        if let Some(index) = &self.index {
            index.sync_data()?;
        }
        Ok(())
    }

    /// Whether it has forgotten which of its sectors are zeroed, so that nothing may lie below.
    pub(crate) fn forgot_zeroes(&self) -> bool {
        self.reopened && self.mode == Mode::Sparse
    }

    /// The bytes of the data file.
    pub(crate) fn source(&self) -> &dyn ReadAt {
        self.data.as_ref()
    }

    /// Fill `pieces` with the first pieces from `lba` on, at most until `sectors` sectors are covered. How many it were.
    pub(crate) fn pieces(&self, lba: u64, sectors: u64, pieces: &mut [Piece]) -> usize {
        self.with_map(|map| {
            let mut count = 0;
            for (slot, piece) in pieces.iter_mut().zip(map.pieces(lba, sectors)) {
                *slot = piece;
                count += 1;
            }
            count
        })
    }

    /// See [`Map::fragments`].
    pub(crate) fn fragments(&self, lba: u64, gap: u64, longest: u64) -> Option<(u64, u64)> {
        self.with_map(|map| map.fragments(lba, gap, longest))
    }

    /// Change the size, in the files first. Synced.
    pub(crate) fn resize(&self, virtual_size: u64) -> Result<()> {
        check_size(virtual_size)?;
        if self.mode == Mode::Sparse {
            self.data.0.set_len(HEADER_BYTES as u64 + virtual_size)?;
        }
        self.patch_headers(VIRTUAL_SIZE_AT, &virtual_size.to_le_bytes())?;
        self.virtual_size.store(virtual_size, Ordering::Release);
        self.flush()
    }

    /// Name another parent. Not synced.
    pub(crate) fn set_parent_uuid(&mut self, parent_uuid: Option<Uuid>) -> Result<()> {
        self.patch_headers(PARENT_UUID_AT, &uuid_text(parent_uuid))?;
        self.parent_uuid = parent_uuid;
        Ok(())
    }

    fn patch_headers(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.data.0.write_all_at(bytes, at as u64)?;
        if let Some(index) = &self.index {
            index.write_all_at(bytes, at as u64)?;
        }
        Ok(())
    }

    /// The sector of the data file behind all data.
    fn data_end(&self) -> u64 {
        match self.mode {
            Mode::Sparse => FIRST_DATA_SECTOR + self.virtual_size().div_ceil(SECTOR),
            Mode::Append | Mode::Hybrid => self.allocated.load(Ordering::Acquire),
        }
    }

    fn with_map<T>(&self, look: impl FnOnce(&Map) -> T) -> T {
        look(&self.map.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn lock_log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mode {
    fn flag(self) -> u32 {
        match self {
            Self::Append => 0,
            Self::Hybrid => flags::HYBRID,
            Self::Sparse => flags::SPARSE,
        }
    }

    fn of(header: &Header) -> Self {
        if header.has(flags::SPARSE) {
            Self::Sparse
        } else if header.has(flags::HYBRID) {
            Self::Hybrid
        } else {
            Self::Append
        }
    }
}

/// Bytes of a range of sectors.
fn bytes_of(sectors: Range<u64>) -> Range<u64> {
    sectors.start * SECTOR..sectors.end * SECTOR
}

fn check_size(virtual_size: u64) -> Result<()> {
    if virtual_size % SECTOR != 0 {
        return Err(Error::Invalid(format!(
            "a virtual size of {virtual_size} bytes is no multiple of {SECTOR}"
        )));
    }
    if virtual_size > MAX_VIRTUAL_SIZE {
        return Err(Error::Limit(format!(
            "a virtual size of {virtual_size} bytes"
        )));
    }
    Ok(())
}
