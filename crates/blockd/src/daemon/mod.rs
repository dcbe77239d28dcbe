//! All devices of the daemon and what can be done with them: the methods of docs/blockd.md, without their messages.
//!
//! Work on one device is done one at a time; devices do not wait for each other. Whatever outlives the process is in the
//! state directory before it exists.

mod exports;
mod open;
mod recover;
mod report;
mod restack;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::device::uppers::UpperDirectory;
use crate::device::StackDevice;
use crate::error::{Error, Result};
use crate::events::Events;
use crate::export::nbd::Acceptor;
use crate::export::{Export, Stop, Target};
use crate::layers::Layers;
use crate::state::{DeviceRecord, Durability, StateDirectory};
use crate::workers::Workers;

pub use exports::ExportRequest;
pub use report::{DeviceView, LayerView};
pub use restack::SealedLayer;

/// Threads for slow requests of all devices together.
const WORKERS: usize = 64;
/// Threads that open devices at the start, and flush them at the end.
const PARALLEL: usize = 8;

/// The daemon.
pub struct Daemon {
    state: StateDirectory,
    layers: Layers,
    workers: Workers,
    acceptor: Acceptor,
    events: Events,
    started: Instant,
    ending: AtomicBool,
    devices: Mutex<BTreeMap<String, Arc<Slot>>>,
    /// Held while the path or number of an export is chosen and claimed.
    numbers: Mutex<()>,
}

/// The place of a device, whether it is open or not. Its lock orders all work on the device.
struct Slot {
    device: Mutex<Option<Device>>,
    /// What `list` and `stats` show while the other lock is held.
    view: Mutex<Option<Arc<report::Snapshot>>>,
}

/// A device that the state directory knows.
struct Device {
    record: DeviceRecord,
    /// None if it could not be opened.
    open: Option<OpenDevice>,
    /// Why it, or one of its exports, could not be opened.
    error: Option<Error>,
}

struct OpenDevice {
    device: Arc<StackDevice>,
    upper: Option<UpperDirectory>,
    exports: Vec<Box<dyn Export>>,
}

impl Daemon {
    /// Lock the state directory, and open and export all devices again that it has.
    ///
    /// # Errors
    /// `Conflict` when another daemon has the directory, `Io`. That a device cannot be opened is none: it is listed with
    /// its error.
    pub fn start(state: &Path) -> Result<Arc<Self>> {
        let state = StateDirectory::open(state)?;
        let acceptor =
            Acceptor::start().map_err(|error| Error::io("start accepting clients", &error))?;
        let daemon = Arc::new(Self {
            state,
            layers: Layers::default(),
            workers: Workers::new(WORKERS),
            acceptor,
            events: Events::default(),
            started: Instant::now(),
            ending: AtomicBool::new(false),
            devices: Mutex::default(),
            numbers: Mutex::new(()),
        });
        daemon.recover()?;
        Ok(daemon)
    }

    /// Where events come from.
    #[must_use]
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// All that was written to the device before is on stable storage afterwards.
    ///
    /// # Errors
    /// `NotFound`, `NoSpace`, `Io`.
    pub fn flush(&self, name: &str) -> Result<()> {
        self.with_open(name, |_, open| open.flush(name))
    }

    /// Make the device larger.
    ///
    /// # Errors
    /// `NotFound`, `Conflict` when it is read-only, `BadRequest` when it would shrink.
    pub fn resize(&self, name: &str, virtual_size: u64) -> Result<()> {
        self.with_open(name, |_, open| {
            let stack = open.device.stack();
            if stack.is_read_only() {
                return Err(Error::Conflict(format!("{name} is read-only")));
            }
            if virtual_size < stack.virtual_size() || virtual_size % crate::backend::SECTOR != 0 {
                return Err(Error::BadRequest(format!(
                    "{name} has {} bytes; it can only grow, in steps of 512",
                    stack.virtual_size()
                )));
            }
            stack
                .resize(virtual_size)
                .map_err(|error| Error::layer(format_args!("resize {name}"), error))?;
            open.exports.iter().try_for_each(|export| export.resized())
        })
    }

    /// Put one layer in the place of `count` neighbouring lowers from `first` (0 at the bottom).
    ///
    /// # Errors
    /// `NotFound`, `BadRequest` when there are no such lowers, `BadLayer`, `Io`.
    pub fn replace(&self, name: &str, first: usize, count: usize, layer: &Path) -> Result<()> {
        self.with_open(name, |device, open| {
            let end = first.checked_add(count).filter(|end| *end <= device.lowers.len() && count > 0);
            let Some(end) = end else {
                return Err(Error::BadRequest(format!(
                    "{name} has {} lowers, none can be replaced from {first} on in a number of {count}",
                    device.lowers.len()
                )));
            };
            if device.restack.is_some() {
                return Err(Error::Conflict(format!(
                    "{name} has a restack that could not move its layer; repeat that first"
                )));
            }
            let opened = self.layers.open(layer)?;
            let before = device.lowers.clone();
            device.lowers.splice(first..end, [PathBuf::from(layer)]);
            // Both lists read the same, so it does not matter which one a killed daemon leaves.
            self.state.save(device, Durability::Host)?;
            if let Err(error) = open.device.stack().replace_lowers(first, count, opened) {
                device.lowers = before;
                self.state.save(device, Durability::Host)?;
                return Err(Error::layer(format_args!("replace lowers of {name}"), error));
            }
            Ok(())
        })
    }

    /// End all exports as if killed, and flush. Nothing can be opened afterwards.
    pub fn end(&self) {
        if self.ending.swap(true, Ordering::AcqRel) {
            return;
        }
        let slots: Vec<_> = self.slots();
        in_parallel(slots, |(name, slot)| {
            let mut device = slot.lock();
            let Some(open) = device.as_mut().and_then(|device| device.open.take()) else {
                return;
            };
            if let Err(error) = open.end(&name, Stop::Detach) {
                tracing::error!(device = %name, %error, "at the end");
            }
        });
    }

    fn refuse_at_end(&self) -> Result<()> {
        if self.ending.load(Ordering::Acquire) {
            return Err(Error::Conflict("the daemon is shutting down".into()));
        }
        Ok(())
    }

    fn slots(&self) -> Vec<(String, Arc<Slot>)> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices
            .iter()
            .map(|(name, slot)| (name.clone(), Arc::clone(slot)))
            .collect()
    }

    fn slot(&self, name: &str) -> Option<Arc<Slot>> {
        self.devices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()
    }

    /// Work on a device that is open, and show the result to `list` and `stats`.
    fn with_open<T>(
        &self,
        name: &str,
        work: impl FnOnce(&mut DeviceRecord, &mut OpenDevice) -> Result<T>,
    ) -> Result<T> {
        self.refuse_at_end()?;
        let slot = self.slot(name).ok_or_else(|| no_such_device(name))?;
        let mut guard = slot.lock();
        let device = guard.as_mut().ok_or_else(|| no_such_device(name))?;
        let Some(open) = device.open.as_mut() else {
            let reason = device
                .error
                .as_ref()
                .map_or_else(String::new, ToString::to_string);
            return Err(Error::Conflict(format!(
                "{name} could not be opened again: {reason}"
            )));
        };
        let result = work(&mut device.record, open);
        if open.exports.len() == device.record.exports.len() {
            // An export that could not be taken back at the start runs now, or is gone.
            device.error = None;
        }
        slot.show(guard.as_ref());
        result
    }

    fn target(&self, name: &str, device: &Arc<StackDevice>) -> Target {
        Target {
            device: name.to_owned(),
            backend: Arc::clone(device) as Arc<dyn crate::backend::BlockBackend>,
            workers: self.workers.clone(),
        }
    }
}

impl Slot {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            device: Mutex::new(None),
            view: Mutex::new(None),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Device>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show(&self, device: Option<&Device>) {
        let view = device.map(|device| Arc::new(report::Snapshot::of(device)));
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = view;
    }

    fn view(&self) -> Option<Arc<report::Snapshot>> {
        // If nobody works on the device, look at it as it is now: clients come and go.
        if let Ok(device) = self.device.try_lock() {
            self.show(device.as_ref());
        }
        self.view
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl OpenDevice {
    fn flush(&self, name: &str) -> Result<()> {
        use crate::backend::BlockBackend;
        self.device
            .flush()
            .map_err(|error| Error::io(format_args!("flush {name}"), &error))
    }

    /// Stop all exports, then flush.
    fn end(mut self, name: &str, how: Stop) -> Result<()> {
        let mut result = Ok(());
        for export in self.exports.drain(..) {
            result = result.and(export.stop(how));
        }
        result.and(self.flush(name))
    }
}

fn no_such_device(name: &str) -> Error {
    Error::NotFound(format!("there is no device {name}"))
}

/// Do `work` for all items, on a few threads.
fn in_parallel<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync) {
    let threads = PARALLEL.min(items.len());
    let items = Mutex::new(items.into_iter());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| loop {
                let item = items.lock().unwrap_or_else(PoisonError::into_inner).next();
                match item {
                    Some(item) => work(item),
                    None => return,
                }
            });
        }
    });
}
