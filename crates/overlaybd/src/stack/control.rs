//! Changing what a stack is made of while it is read and written: restack, seal, replacing lowers, resizing.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Instant;

use super::{Lowers, Restacked, Stack, State, MAX_LAYERS};
use crate::layer::{Layer, MAX_WRITTEN_RECORDS};
use crate::record::SECTOR;
use crate::upper::Upper;
use crate::{Error, Result};

impl Stack {
    /// Grow the device to `virtual_size` bytes; that is on stable storage when the call returns.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it would shrink, is unaligned, or there is no upper; [`Error::Limit`] beyond what the
    /// format can express; [`Error::Io`].
    pub fn resize(&self, virtual_size: u64) -> Result<()> {
        let _control = self.take_control();
        let size = self.virtual_size();
        if virtual_size < size {
            return Err(Error::Invalid(format!(
                "a device of {size} bytes cannot shrink to {virtual_size}"
            )));
        }
        self.state().upper()?.resize(virtual_size)?;
        self.virtual_size
            .store(virtual_size, std::sync::atomic::Ordering::Release);
        Ok(())
    }

    /// Seal the upper in place and go on with a fresh one on top of it, at one moment for every reader and writer. The
    /// fresh upper gets the stack's size, and the sealed one as its parent. Takes time by the number of records, not by
    /// the amount of data. The sealed layer, and the fresh upper's headers, are on stable storage when the call returns;
    /// the old upper's index file is not needed any more then.
    ///
    /// # Errors
    /// [`Error::Invalid`] without upper, [`Error::Limit`] when there are too many layers or records, [`Error::Io`]. The
    /// stack goes on with its old upper then, and the fresh one is dropped. One exception: when the disk fails to make
    /// the sealed layer durable after the switch, the stack is on the fresh upper and flushes fail from then on.
    pub fn restack(&self, mut fresh: Upper) -> Result<Restacked> {
        let _control = self.take_control();
        let size = self.virtual_size().next_multiple_of(SECTOR);
        if fresh.records() != 0 {
            return Err(Error::Invalid(
                "the upper to go on with must be empty".into(),
            ));
        }
        if fresh.parent_uuid().is_none() {
            fresh.set_parent_uuid(Some(self.state().upper()?.uuid()))?;
        }
        if fresh.virtual_size() == size {
            fresh.flush()?;
        } else {
            fresh.resize(size)?;
        }
        self.exchange_upper(Some(fresh))
    }

    /// Seal the upper in place; the device is read-only afterwards.
    ///
    /// # Errors
    /// As [`Stack::restack`].
    pub fn seal(&self) -> Result<Restacked> {
        let _control = self.take_control();
        self.exchange_upper(None)
    }

    /// Put `layer` in the place of `count` neighbouring lowers from `first` (0 at the bottom). It must hold what they
    /// hold together (see [`crate::commit::merge`]); that is the caller's word.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there are no such lowers, [`Error::Limit`].
    pub fn replace_lowers(&self, first: usize, count: usize, layer: Arc<Layer>) -> Result<()> {
        let _control = self.take_control();
        let old = self.state();
        let mut layers = old.lowers.layers().to_vec();
        let end = first
            .checked_add(count)
            .filter(|end| count > 0 && *end <= layers.len());
        let Some(end) = end else {
            return Err(Error::Invalid(format!(
                "there are no {count} layers from number {first} on in a stack of {}",
                layers.len()
            )));
        };
        layers.splice(first..end, [layer]);
        let lowers = Lowers::merge(layers)?;
        self.set_state(State {
            lowers,
            upper: old.upper.clone(),
        });
        Ok(())
    }

    /// Whoever calls it has control.
    fn exchange_upper(&self, fresh: Option<Upper>) -> Result<Restacked> {
        let old = self.state();
        let upper = old.upper()?;
        if old.lowers.layers().len() == MAX_LAYERS {
            return Err(Error::Limit(format!(
                "a stack has at most {MAX_LAYERS} sealed layers"
            )));
        }
        self.defragment(&old, upper, MAX_WRITTEN_RECORDS)?;
        // Now, while others write, so that little is left to be synced when the layer is complete.
        upper.flush()?;
        let mut lost = self.lost.write().unwrap_or_else(PoisonError::into_inner);
        let began = Instant::now();
        let closed = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        let seal = upper.begin_seal()?;
        let layer = Arc::new(upper.sealed_layer(&seal));
        let lowers = old
            .lowers
            .with_top(Arc::clone(&layer))
            .inspect_err(|_| upper.cancel_seal(&seal))?;
        self.set_state(State {
            lowers,
            upper: fresh.map(Arc::new),
        });
        drop(closed);
        let paused = began.elapsed();
        if let Err(error) = upper.finish_seal(&seal) {
            *lost = true;
            return Err(error);
        }
        Ok(Restacked { layer, paused })
    }

    fn set_state(&self, state: State) {
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(state);
    }

    fn take_control(&self) -> MutexGuard<'_, ()> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
