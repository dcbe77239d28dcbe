//! Exports: the ways in which a device becomes visible to a machine.
//!
//! [`Export`] is what the daemon sees of one; each kind lives in a file of its own. Nothing here knows of layers or of the
//! protocol's messages.
//!
//! The life of an export of a kernel device: the daemon asks for a free number, writes the record (with that number) to
//! the device's state file, and only then starts the export, so that a killed daemon knows what to take back. At the next
//! start the same record comes back with [`Start::Recover`].

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::backend::BlockBackend;
use crate::error::{Error, Result};
use crate::socket;
use crate::workers::Workers;

pub mod kernel_nbd;
pub mod nbd;
pub mod ublk;

/// What an export is, as the state file has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ExportRecord {
    /// NBD on a unix socket.
    Nbd {
        /// Of the socket, absolute.
        path: PathBuf,
    },
    /// `/dev/ublkb<number>`.
    Ublk {
        /// Hardware queues, each with a thread.
        queues: u16,
        /// Requests in flight per queue.
        depth: u16,
        /// Of the device.
        number: u32,
    },
    /// `/dev/nbd<number>`, served through socket pairs.
    KernelNbd {
        /// Sockets, each with a thread.
        connections: u16,
        /// Of the device.
        number: u32,
    },
}

impl ExportRecord {
    /// The name of the kind in the protocol.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nbd { .. } => "nbd",
            Self::Ublk { .. } => "ublk",
            Self::KernelNbd { .. } => "kernel-nbd",
        }
    }

    /// Where a client finds the device.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        match self {
            Self::Nbd { path } => path.clone(),
            Self::Ublk { number, .. } => PathBuf::from(format!("/dev/ublkb{number}")),
            Self::KernelNbd { number, .. } => PathBuf::from(format!("/dev/nbd{number}")),
        }
    }
}

/// Remove what a daemon before us left of an export that was not taken back. That there is nothing is no error.
///
/// # Errors
/// When the kernel refuses.
pub fn remove_left(device: &str, record: &ExportRecord) -> Result<()> {
    match record {
        ExportRecord::Nbd { path } => match socket::unlink(path) {
            // What is no socket is not ours.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
            result => {
                result.map_err(|error| Error::io(format_args!("remove {}", path.display()), &error))
            }
        },
        ExportRecord::Ublk { number, .. } => ublk::remove_left(device, *number),
        ExportRecord::KernelNbd { number, .. } => kernel_nbd::remove_left(device, *number),
    }
}

/// What every export gets from the daemon.
#[derive(Clone)]
pub struct Target {
    /// Name of the device, for logs and NBD export names.
    pub device: String,
    /// What is read and written.
    pub backend: Arc<dyn BlockBackend>,
    /// Where calls go that may wait for a disk.
    pub workers: Workers,
}

/// Whether an export is new or comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Nothing of it exists. If the number was taken by someone else meanwhile: [`crate::error::Error::Conflict`], and the
    /// daemon tries the next one.
    New,
    /// A daemon before us had it: take the kernel's device back with its waiting requests; if it is gone (host reboot, or
    /// killed between the record and the device), make it with the same number.
    Recover,
}

/// How an export ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// For good: clients are disconnected, the socket or kernel device is removed.
    Remove,
    /// The daemon ends and will come back: clients of a kernel device are to see a pause, as if it had been killed.
    Detach,
}

/// A running export. Dropping one without [`Export::stop`] is a defect.
pub trait Export: Send + Sync {
    /// What to write to the state file.
    fn record(&self) -> &ExportRecord;

    /// Connections or queues that are open.
    fn connections(&self) -> usize;

    /// The device has grown; tell the kernel.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn resized(&self) -> Result<()> {
        Ok(())
    }

    /// End it and return when no request is in flight any more.
    ///
    /// # Errors
    /// When the kernel refuses; the export is gone as far as the daemon is concerned.
    fn stop(self: Box<Self>, how: Stop) -> Result<()>;
}
