//! Exporting devices.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use super::{Daemon, OpenDevice};
use crate::device::StackDevice;
use crate::error::{Error, Result};
use crate::export::{kernel_nbd, remove_left, ublk, Export, ExportRecord, Start, Stop};
use crate::state::{DeviceRecord, Durability};

/// Attempts to find a kernel device that nobody else takes at the same moment.
const ATTEMPTS: usize = 8;

/// How a device is to be exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExportRequest {
    /// NBD on a unix socket.
    Nbd {
        /// Of the socket, absolute.
        path: PathBuf,
    },
    /// A ublk device.
    Ublk {
        /// Hardware queues.
        queues: u16,
        /// Requests per queue.
        depth: u16,
    },
    /// A kernel NBD device.
    KernelNbd {
        /// Sockets.
        connections: u16,
    },
}

impl Daemon {
    /// Export a device, or find the export that it has.
    ///
    /// # Errors
    /// `NotFound`, `Conflict` when another device has the socket's path, `Unsupported`, `Io`.
    pub fn export(&self, name: &str, request: &ExportRequest) -> Result<ExportRecord> {
        self.with_open(name, |record, open| match request {
            ExportRequest::Nbd { path } => self.export_nbd(name, record, open, path),
            ExportRequest::Ublk { .. } | ExportRequest::KernelNbd { .. } => {
                self.export_kernel(name, record, open, request)
            }
        })
    }

    /// End the export that clients find at `path`.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn unexport(&self, name: &str, path: &Path) -> Result<()> {
        self.with_open(name, |record, open| {
            let Some(known) = record
                .exports
                .iter()
                .position(|export| export.path() == path)
            else {
                return Err(Error::NotFound(format!(
                    "{name} has no export at {}",
                    path.display()
                )));
            };
            let known = record.exports.swap_remove(known);
            let result = if let Some(at) = open
                .exports
                .iter()
                .position(|export| export.record().path() == path)
            {
                open.exports.swap_remove(at).stop(Stop::Remove)
            } else {
                remove_left(name, &known)
            };
            self.state.save(record, Durability::Process)?;
            result
        })
    }

    pub(super) fn start_export(
        &self,
        name: &str,
        device: &Arc<StackDevice>,
        record: &ExportRecord,
        start: Start,
    ) -> Result<Box<dyn Export>> {
        let target = self.target(name, device);
        match record {
            ExportRecord::Nbd { path } => self.acceptor.export(target, path),
            ExportRecord::Ublk {
                queues,
                depth,
                number,
            } => ublk::start(target, *number, *queues, *depth, start),
            ExportRecord::KernelNbd {
                connections,
                number,
            } => kernel_nbd::start(target, *number, *connections, start),
        }
    }

    fn export_nbd(
        &self,
        name: &str,
        record: &mut DeviceRecord,
        open: &mut OpenDevice,
        path: &Path,
    ) -> Result<ExportRecord> {
        let wanted = ExportRecord::Nbd { path: path.into() };
        if open.exports.iter().any(|export| *export.record() == wanted) {
            return Ok(wanted);
        }
        let guard = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        if self.other_exports(name).contains(&wanted) {
            return Err(Error::Conflict(format!(
                "another device is exported at {}",
                path.display()
            )));
        }
        let known = record.exports.contains(&wanted);
        if !known {
            self.claim(record, &wanted);
        }
        drop(guard);
        if !known {
            self.save_exports(record, &wanted)?;
        }
        match self.start_export(name, &open.device, &wanted, Start::New) {
            Ok(export) => {
                open.exports.push(export);
                Ok(wanted)
            }
            Err(error) => {
                record.exports.retain(|export| *export != wanted);
                self.state.save(record, Durability::Process)?;
                Err(error)
            }
        }
    }

    fn export_kernel(
        &self,
        name: &str,
        record: &mut DeviceRecord,
        open: &mut OpenDevice,
        request: &ExportRequest,
    ) -> Result<ExportRecord> {
        let is_wanted = |export: &ExportRecord| {
            matches!(
                (export, request),
                (ExportRecord::Ublk { .. }, ExportRequest::Ublk { .. })
                    | (
                        ExportRecord::KernelNbd { .. },
                        ExportRequest::KernelNbd { .. }
                    )
            )
        };
        if let Some(export) = open
            .exports
            .iter()
            .find(|export| is_wanted(export.record()))
        {
            return Ok(export.record().clone());
        }
        // One that could not be taken back at the start gets another chance.
        if let Some(known) = record
            .exports
            .iter()
            .find(|export| is_wanted(export))
            .cloned()
        {
            open.exports
                .push(self.start_export(name, &open.device, &known, Start::Recover)?);
            return Ok(known);
        }
        let mut taken = Vec::new();
        let mut attempts = 0;
        loop {
            let guard = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
            let mut numbers = taken.clone();
            numbers.extend(self.other_exports(name).iter().filter_map(|export| {
                match (export, request) {
                    (ExportRecord::Ublk { number, .. }, ExportRequest::Ublk { .. })
                    | (ExportRecord::KernelNbd { number, .. }, ExportRequest::KernelNbd { .. }) => {
                        Some(*number)
                    }
                    _ => None,
                }
            }));
            let (wanted, number) = choose(request, &numbers)?;
            self.claim(record, &wanted);
            drop(guard);
            self.save_exports(record, &wanted)?;
            match self.start_export(name, &open.device, &wanted, Start::New) {
                Ok(export) => {
                    open.exports.push(export);
                    return Ok(wanted);
                }
                Err(error) => {
                    record.exports.retain(|export| *export != wanted);
                    self.state.save(record, Durability::Process)?;
                    attempts += 1;
                    if !matches!(error, Error::Conflict(_)) || attempts == ATTEMPTS {
                        return Err(error);
                    }
                    taken.push(number);
                }
            }
        }
    }

    /// Have others that choose a path or number see this one, before it is written down and while it is not running yet.
    fn claim(&self, record: &mut DeviceRecord, wanted: &ExportRecord) {
        record.exports.push(wanted.clone());
        if let Some(slot) = self.slot(&record.device) {
            slot.show_exports(record);
        }
    }

    /// Write down an export that is about to be made.
    fn save_exports(&self, record: &mut DeviceRecord, wanted: &ExportRecord) -> Result<()> {
        let result = self.state.save(record, Durability::Process);
        if result.is_err() {
            record.exports.retain(|export| export != wanted);
        }
        result
    }

    fn other_exports(&self, name: &str) -> Vec<ExportRecord> {
        let slots = self.slots().into_iter().filter(|(other, _)| other != name);
        slots
            .filter_map(|(_, slot)| slot.shown())
            .flat_map(|view| view.record.exports.clone())
            .collect()
    }
}

fn choose(request: &ExportRequest, taken: &[u32]) -> Result<(ExportRecord, u32)> {
    match request {
        ExportRequest::Nbd { .. } => Err(Error::Internal("a socket has no number".into())),
        ExportRequest::Ublk { queues, depth } => {
            let number = ublk::free_number(taken)?;
            let record = ExportRecord::Ublk {
                queues: *queues,
                depth: *depth,
                number,
            };
            Ok((record, number))
        }
        ExportRequest::KernelNbd { connections } => {
            let number = kernel_nbd::free_number(taken)?;
            let record = ExportRecord::KernelNbd {
                connections: *connections,
                number,
            };
            Ok((record, number))
        }
    }
}
