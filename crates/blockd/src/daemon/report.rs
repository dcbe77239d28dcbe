//! What the daemon tells about itself and its devices.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, Weak};

use serde::Serialize;

use super::{no_such_device, Daemon, Device, Slot};
use crate::device::{StackDevice, Totals};
use crate::error::{Error, Result};
use crate::state::{DeviceRecord, UpperMode};

/// What is known of a device without its lock.
pub(super) struct Snapshot {
    pub record: DeviceRecord,
    pub error: Option<Error>,
    /// Weak, so that looking at a device never keeps its files open.
    device: Weak<StackDevice>,
    connections: usize,
    upper_allocated_bytes: u64,
}

impl Snapshot {
    pub fn of(device: &Device) -> Self {
        let open = device.open.as_ref();
        Self {
            record: device.record.clone(),
            error: device.error.clone(),
            device: open.map_or_else(Weak::new, |open| Arc::downgrade(&open.device)),
            connections: open.map_or(0, |open| {
                open.exports.iter().map(|export| export.connections()).sum()
            }),
            upper_allocated_bytes: open
                .and_then(|open| open.upper.as_ref())
                .map_or(0, |upper| upper.allocated_bytes()),
        }
    }
}

impl Slot {
    /// What was shown last.
    pub(super) fn shown(&self) -> Option<Arc<Snapshot>> {
        self.view
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Show the exports of `record`, in the middle of work on the device.
    pub(super) fn show_exports(&self, record: &DeviceRecord) {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shown) = view.as_ref() {
            *view = Some(Arc::new(Snapshot {
                record: record.clone(),
                error: shown.error.clone(),
                device: shown.device.clone(),
                connections: shown.connections,
                upper_allocated_bytes: shown.upper_allocated_bytes,
            }));
        }
    }
}

/// An upper, as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct UpperView {
    pub directory: PathBuf,
    pub mode: UpperMode,
}

/// An export, as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct ExportView {
    pub kind: &'static str,
    pub path: PathBuf,
}

/// A device, as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct DeviceView {
    pub device: String,
    pub lowers: Vec<PathBuf>,
    pub upper: Option<UpperView>,
    pub virtual_size: u64,
    pub read_only: bool,
    pub opens: u64,
    pub exports: Vec<ExportView>,
    /// Why the device, or an export of it, could not be opened at the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Numbers of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct DeviceNumbers {
    #[serde(flatten)]
    pub totals: Totals,
    pub connections: usize,
    pub upper_records: usize,
    pub upper_data_bytes: u64,
    pub upper_allocated_bytes: u64,
    pub depth: usize,
    pub merged_records: usize,
}

/// A layer that is open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct LayerView {
    pub path: PathBuf,
    pub uuid: String,
    /// How many devices stand on it.
    pub devices: usize,
}

/// Numbers of the daemon itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct DaemonNumbers {
    pub uptime_s: f64,
    pub open_layers: usize,
    pub threads: usize,
}

/// The answer to `stats`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Numbers {
    pub daemon: DaemonNumbers,
    pub devices: std::collections::BTreeMap<String, DeviceNumbers>,
    pub layers: Vec<LayerView>,
}

impl Daemon {
    /// All devices.
    #[must_use]
    pub fn list(&self) -> Vec<DeviceView> {
        let slots = self.slots();
        slots
            .iter()
            .filter_map(|(_, slot)| Some(view(&*slot.view()?)))
            .collect()
    }

    /// One device.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn describe(&self, name: &str) -> Result<DeviceView> {
        let snapshot = self.slot(name).and_then(|slot| slot.view());
        snapshot
            .map(|snapshot| view(&snapshot))
            .ok_or_else(|| no_such_device(name))
    }

    /// Numbers of the daemon, its layers, and one device or all.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn numbers(&self, name: Option<&str>) -> Result<Numbers> {
        let mut devices = std::collections::BTreeMap::new();
        let mut layers: HashMap<usize, LayerView> = HashMap::new();
        for (other, slot) in self.slots() {
            let Some(snapshot) = slot.view() else {
                continue;
            };
            let Some(device) = snapshot.device.upgrade() else {
                continue;
            };
            let lowers = device.stack().lowers();
            for (layer, path) in lowers.layers().iter().zip(&snapshot.record.lowers) {
                let seen = layers
                    .entry(Arc::as_ptr(layer) as usize)
                    .or_insert_with(|| LayerView {
                        path: path.clone(),
                        uuid: layer.uuid().to_string(),
                        devices: 0,
                    });
                seen.devices += 1;
            }
            if name.is_none_or(|name| name == other) {
                devices.insert(other, numbers_of(&snapshot, &device));
            }
        }
        if let Some(name) = name.filter(|name| !devices.contains_key(*name)) {
            return Err(no_such_device(name));
        }
        let mut layers: Vec<_> = layers.into_values().collect();
        layers.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(Numbers {
            daemon: DaemonNumbers {
                uptime_s: self.started.elapsed().as_secs_f64(),
                open_layers: self.layers.count(),
                threads: threads(),
            },
            devices,
            layers,
        })
    }
}

fn view(snapshot: &Snapshot) -> DeviceView {
    let record = &snapshot.record;
    let device = snapshot.device.upgrade();
    DeviceView {
        device: record.device.clone(),
        lowers: record.lowers.clone(),
        upper: record.upper.as_ref().map(|upper| UpperView {
            directory: upper.directory.clone(),
            mode: upper.mode,
        }),
        virtual_size: device.as_ref().map_or_else(
            || record.upper.as_ref().map_or(0, |upper| upper.virtual_size),
            |device| device.stack().virtual_size(),
        ),
        read_only: record.upper.is_none(),
        opens: record.opens,
        exports: record
            .exports
            .iter()
            .map(|export| ExportView {
                kind: export.kind(),
                path: export.path(),
            })
            .collect(),
        error: snapshot.error.as_ref().map(ToString::to_string),
    }
}

fn numbers_of(snapshot: &Snapshot, device: &StackDevice) -> DeviceNumbers {
    let statistics = device.stack().statistics();
    DeviceNumbers {
        totals: device.totals(),
        connections: snapshot.connections,
        upper_records: statistics.upper_records,
        upper_data_bytes: statistics.upper_data_bytes,
        upper_allocated_bytes: snapshot.upper_allocated_bytes,
        depth: statistics.depth,
        merged_records: statistics.merged_records,
    }
}

/// Threads of this process, as the kernel counts them.
fn threads() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Threads:"));
    line.and_then(|number| number.trim().parse().ok())
        .unwrap_or(0)
}
