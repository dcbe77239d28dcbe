//! A device made of layers: sealed lowers and, if it can be written, an upper. Thread-safe throughout. It must not know
//! how the device is exported, nor name or delete files.

mod control;
mod defragment;
mod lowers;
mod view;

pub use lowers::{Lowers, MAX_LAYERS};
pub(crate) use view::View;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use crate::layer::Layer;
use crate::record::SECTOR;
use crate::upper::{Mode, Upper};
use crate::{Error, Result};

/// Runs of sectors that a discard looks for before it records them.
const DISCARD_BATCH: usize = 4096;

/// What a part of the device consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Stored in some layer.
    Data,
    /// Zeros, because a layer says so.
    Zero,
    /// Zeros, because no layer says anything.
    Hole,
}

/// A part of the device of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// What it consists of.
    pub kind: ExtentKind,
}

/// The outcome of [`Stack::restack`].
pub struct Restacked {
    /// What was the upper, sealed; all of it is on stable storage. The topmost of the stack's lowers now.
    pub layer: Arc<Layer>,
    /// How long writers had to wait.
    pub paused: Duration,
}

/// Numbers of a stack at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    /// Lowers, and the upper if there is one.
    pub depth: usize,
    /// Records of the merged index of the lowers.
    pub merged_records: usize,
    /// Records that the upper has in memory; 0 without upper.
    pub upper_records: usize,
    /// Bytes of the device that the upper holds.
    pub upper_data_bytes: u64,
    /// Length of the upper's data file in bytes, with holes and what is overwritten.
    pub upper_file_bytes: u64,
    /// How the upper stores, if there is one.
    pub upper_mode: Option<Mode>,
}

/// A device. All offsets and lengths are in bytes and multiples of 512; a request must end within
/// [`Stack::virtual_size`].
pub struct Stack {
    state: RwLock<Arc<State>>,
    virtual_size: AtomicU64,
    /// Held for reading by everyone who changes the upper, for writing while the upper is exchanged.
    gate: RwLock<()>,
    /// Held by everyone who changes which layers there are, or the size.
    control: Mutex<()>,
    /// Held for writing until a sealed layer is on stable storage: nothing above it may be called durable before. `true`
    /// when that failed.
    lost: RwLock<bool>,
}

/// The layers of one moment.
struct State {
    lowers: Arc<Lowers>,
    upper: Option<Arc<Upper>>,
}

impl State {
    fn view(&self) -> View<'_> {
        View {
            lowers: Some(&self.lowers),
            upper: self.upper.as_deref(),
        }
    }

    fn upper(&self) -> Result<&Arc<Upper>> {
        self.upper
            .as_ref()
            .ok_or_else(|| Error::Invalid("the device is read-only".into()))
    }
}

impl Stack {
    /// Put an upper, or nothing, on lowers. An upper of size 0 takes the lowers' size, and writes that down.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a sparse upper that was opened again on top of layers, [`Error::Io`] when the size could
    /// not be written.
    pub fn open(lowers: Arc<Lowers>, upper: Option<Upper>) -> Result<Self> {
        let mut virtual_size = lowers.virtual_size();
        if let Some(upper) = &upper {
            if upper.forgot_zeroes() && !lowers.layers().is_empty() {
                return Err(Error::Invalid(
                    "a sparse upper that is opened again forgets its zeros: it cannot lie on layers".into(),
                ));
            }
            match upper.virtual_size() {
                0 if virtual_size != 0 => upper.resize(virtual_size.next_multiple_of(SECTOR))?,
                size => virtual_size = size,
            }
        }
        let upper = upper.map(Arc::new);
        Ok(Self {
            state: RwLock::new(Arc::new(State { lowers, upper })),
            virtual_size: AtomicU64::new(virtual_size),
            gate: RwLock::default(),
            control: Mutex::default(),
            lost: RwLock::default(),
        })
    }

    /// Size of the device in bytes.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size.load(Ordering::Acquire)
    }

    /// How many layers there are, the upper included.
    #[must_use]
    pub fn depth(&self) -> usize {
        let state = self.state();
        state.lowers.layers().len() + usize::from(state.upper.is_some())
    }

    /// Whether there is no upper.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.state().upper.is_none()
    }

    /// The sealed layers of this moment.
    #[must_use]
    pub fn lowers(&self) -> Arc<Lowers> {
        Arc::clone(&self.state().lowers)
    }

    /// Fill the buffer from `offset`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when unaligned or out of range, [`Error::Io`].
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let lba = self.check(offset, buffer.len() as u64)?;
        self.state().view().read(buffer, lba)
    }

    /// Like [`Stack::read_at`], but only when it needs no wait for a disk: `false` when it would, and then the content
    /// of the buffer is unspecified.
    ///
    /// # Errors
    /// As [`Stack::read_at`].
    pub fn try_read_at(&self, buffer: &mut [u8], offset: u64) -> Result<bool> {
        let lba = self.check(offset, buffer.len() as u64)?;
        self.state().view().try_read(buffer, lba)
    }

    /// Write to the upper. After an error any part of the range may be written.
    ///
    /// # Errors
    /// [`Error::Invalid`] when unaligned, out of range, or read-only; [`Error::Io`], in which
    /// [`Error::is_out_of_space`] tells that it will work again when there is room.
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        let lba = self.check(offset, data.len() as u64)?;
        let _writer = self.pass_gate();
        self.state().upper()?.write(lba, data)
    }

    /// Make a range read as zeros and give its space back where the upper holds it. Only sectors that would not read as
    /// zeros already are recorded.
    ///
    /// # Errors
    /// As [`Stack::write_at`].
    pub fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let lba = self.check(offset, length)?;
        let _writer = self.pass_gate();
        let state = self.state();
        let upper = state.upper()?;
        let mut shown = Vec::new();
        state.view().shown(lba, length / SECTOR, |lba, sectors| {
            shown.push((lba, sectors));
            if shown.len() == DISCARD_BATCH {
                upper.zero(&shown)?;
                shown.clear();
            }
            Ok(())
        })?;
        upper.zero(&shown)
    }

    /// Make a range read as zeros. The same as [`Stack::discard`].
    ///
    /// # Errors
    /// As [`Stack::write_at`].
    pub fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        self.discard(offset, length)
    }

    /// Return when all writes that have returned are on stable storage.
    ///
    /// # Errors
    /// [`Error::Io`]. A read-only stack has nothing to do.
    pub fn flush(&self) -> Result<()> {
        let state = {
            let lost = self.lost.read().unwrap_or_else(PoisonError::into_inner);
            if *lost {
                return Err(Error::Io(std::io::Error::other(
                    "a sealed layer of this device could not be made durable",
                )));
            }
            self.state()
        };
        state.upper.as_ref().map_or(Ok(()), |upper| upper.flush())
    }

    /// What a range of bytes consists of: extents in order that tile it, no two neighbours of one kind.
    ///
    /// # Errors
    /// [`Error::Invalid`] when unaligned or out of range.
    pub fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>> {
        let length = range
            .end
            .checked_sub(range.start)
            .ok_or_else(|| Error::Invalid(format!("the range {range:?} ends before it begins")))?;
        let lba = self.check(range.start, length)?;
        let mut extents = Vec::new();
        self.state()
            .view()
            .extents(lba, length / SECTOR, |extent| {
                extents.push(extent);
                Ok(())
            })?;
        Ok(extents)
    }

    /// Numbers of this moment.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let state = self.state();
        let upper = state.upper.as_ref();
        Statistics {
            depth: state.lowers.layers().len() + usize::from(upper.is_some()),
            merged_records: state.lowers.index().len(),
            upper_records: upper.map_or(0, |upper| upper.records()),
            upper_data_bytes: upper.map_or(0, |upper| upper.data_bytes()),
            upper_file_bytes: upper.map_or(0, |upper| upper.file_bytes()),
            upper_mode: upper.map(|upper| upper.mode()),
        }
    }

    /// Look at all layers of this moment.
    pub(crate) fn with_view<T>(&self, look: impl FnOnce(View<'_>) -> T) -> T {
        look(self.state().view())
    }

    fn state(&self) -> Arc<State> {
        Arc::clone(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// What is read from [`Stack::state`] afterwards stays the upper until the guard is dropped.
    fn pass_gate(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first sector of a valid request.
    fn check(&self, offset: u64, length: u64) -> Result<u64> {
        if offset % SECTOR != 0 || length % SECTOR != 0 {
            return Err(Error::Invalid(format!(
                "{length} bytes at {offset} are not whole sectors of {SECTOR} bytes"
            )));
        }
        let size = self.virtual_size();
        let end = offset.checked_add(length);
        if end.is_none_or(|end| end > size.next_multiple_of(SECTOR)) {
            return Err(Error::Invalid(format!(
                "{length} bytes at {offset} lie outside of a device of {size} bytes"
            )));
        }
        Ok(offset / SECTOR)
    }
}
