//! Restack and seal: the upper of a live device becomes an immutable layer.
//!
//! The order, so that the next daemon can undo or finish it wherever this one is killed: the intent is written; the fresh
//! upper's files are made; the library seals and switches; the sealed file moves to where the layer shall be; the fresh
//! files get the final names; the device's record is written.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use overlaybd::layer::Layer;
use overlaybd::stack::Restacked;
use overlaybd::Uuid;

use super::{Daemon, OpenDevice};
use crate::device::uppers::{self, UpperDirectory};
use crate::error::{Error, Result};
use crate::fail_point::fail_point;
use crate::state::{DeviceRecord, Durability, RestackRecord, UpperMode, UuidText};

/// A layer that was an upper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedLayer {
    /// Where it is.
    pub path: PathBuf,
    /// Identity.
    pub uuid: Uuid,
    /// The layer below.
    pub parent_uuid: Option<Uuid>,
    /// Bytes of the device.
    pub virtual_size: u64,
    /// Records of its index.
    pub records: usize,
    /// Bytes of the device that it holds.
    pub data_bytes: u64,
    /// Bytes of the file.
    pub size: u64,
    /// How long requests had to wait.
    pub paused: Duration,
}

impl Daemon {
    /// Seal the upper, move it to `layer`, and go on with a fresh upper, whose UUID is `fresh`.
    ///
    /// # Errors
    /// `NotFound`, `Conflict` when the device has no upper or a sparse one, or `layer` exists, `BadRequest` when it lies in another file
    /// system, `BadLayer` when there are too many layers, `NoSpace`, `Io`. The device goes on in any case.
    pub fn restack(&self, name: &str, layer: &Path, fresh: Option<Uuid>) -> Result<SealedLayer> {
        self.capture(name, layer, Some(fresh.unwrap_or_else(Uuid::new_v4)))
    }

    /// Seal the upper and move it to `layer`; the device is read-only afterwards.
    ///
    /// # Errors
    /// As [`Daemon::restack`].
    pub fn seal(&self, name: &str, layer: &Path) -> Result<SealedLayer> {
        self.capture(name, layer, None)
    }

    fn capture(&self, name: &str, layer: &Path, fresh: Option<Uuid>) -> Result<SealedLayer> {
        self.with_open(name, |record, open| {
            self.finish_restack(name, record, open)?;
            let (Some(is), Some(upper)) = (&record.upper, open.upper.as_mut()) else {
                return Err(Error::Conflict(format!("{name} has no upper")));
            };
            if fresh.is_some() && is.mode == UpperMode::Sparse {
                return Err(Error::Conflict(format!(
                    "{name} has a sparse upper, which cannot stand on layers; it can only be sealed"
                )));
            }
            check_target(layer, upper)?;
            record.restack = Some(RestackRecord {
                layer: layer.into(),
                sealed: UuidText(upper.uuid()?),
                fresh: fresh.map(UuidText),
            });
            let sealed_file = upper.data()?;
            if let Err(error) = self.state.save(record, Durability::Host) {
                record.restack = None;
                return Err(error);
            }
            fail_point("restack-intent");
            let restacked = match self.switch(name, open, fresh) {
                Ok(restacked) => restacked,
                Err(Switch::No(error)) => {
                    record.restack = None;
                    self.state.save(record, Durability::Host)?;
                    return Err(error);
                }
                // The device stands on the sealed layer already. Only the files are put in order.
                Err(Switch::Yes(error)) => {
                    self.finish_restack(name, record, open)?;
                    return Err(error);
                }
            };
            fail_point("restack-sealed");
            self.layers.insert(&sealed_file, &restacked.layer);
            self.finish_restack(name, record, open)?;
            uppers::unlock(&sealed_file);
            describe(layer, &restacked.layer, restacked.paused)
        })
    }

    /// Have the library seal and switch.
    fn switch(
        &self,
        name: &str,
        open: &mut OpenDevice,
        fresh: Option<Uuid>,
    ) -> std::result::Result<Restacked, Switch> {
        let stack = open.device.stack();
        let depth = stack.lowers().layers().len();
        let failed = |error| {
            let error = Error::layer(format_args!("seal the upper of {name}"), error);
            if stack.lowers().layers().len() > depth {
                Switch::Yes(error)
            } else {
                Switch::No(error)
            }
        };
        let Some(fresh) = fresh else {
            return stack.seal().map_err(failed);
        };
        let Some(upper) = open.upper.as_mut() else {
            return Err(Switch::No(Error::Conflict(format!("{name} has no upper"))));
        };
        let old = upper.data().map_err(Switch::No)?;
        let options = upper.fresh_options(fresh);
        let fresh = upper.create_next(options).map_err(Switch::No)?;
        fail_point("restack-fresh");
        stack.restack(fresh).map_err(|error| {
            let error = failed(error);
            if matches!(error, Switch::No(_)) {
                upper.keep(old);
                upper.discard_next();
            }
            error
        })
    }

    /// Move files and write the record of a restack or seal after the switch. Nothing to do when there is none.
    pub(super) fn finish_restack(
        &self,
        name: &str,
        record: &mut DeviceRecord,
        open: &mut OpenDevice,
    ) -> Result<()> {
        let Some(restack) = record.restack.clone() else {
            return Ok(());
        };
        let Some(upper) = open.upper.as_ref() else {
            return Err(Error::Internal(format!(
                "{name} has a restack and no upper"
            )));
        };
        // An attempt before this one may have got further.
        if upper.uuid().ok() == Some(restack.sealed.0) {
            upper.publish(&restack.layer)?;
            fail_point("restack-moved");
        }
        if restack.fresh.is_none() {
            upper.remove_index()?;
        } else if upper.uuid().ok() != restack.fresh.map(|uuid| uuid.0) {
            upper.promote_next()?;
        }
        upper.sync(Some(&restack.layer))?;
        fail_point("restack-renamed");
        let before = record.clone();
        record.lowers.push(restack.layer);
        record.restack = None;
        if restack.fresh.is_none() {
            record.upper = None;
        }
        if let Err(error) = self.state.save(record, Durability::Host) {
            *record = before;
            return Err(error);
        }
        if restack.fresh.is_none() {
            open.upper = None;
        }
        Ok(())
    }
}

enum Switch {
    /// The stack is as it was.
    No(Error),
    /// The stack has the sealed layer and the fresh upper.
    Yes(Error),
}

fn check_target(layer: &Path, upper: &UpperDirectory) -> Result<()> {
    let failed = |error| Error::io(format_args!("look at {}", layer.display()), &error);
    let parent = layer
        .parent()
        .ok_or_else(|| Error::BadRequest(format!("{} is no path of a file", layer.display())))?;
    let there = std::fs::metadata(parent).map_err(failed)?;
    if there.dev() != upper.data()?.metadata().map_err(failed)?.dev() {
        return Err(Error::BadRequest(format!(
            "{} is not in the file system of the upper",
            layer.display()
        )));
    }
    match std::fs::symlink_metadata(layer) {
        Ok(_) => Err(Error::Conflict(format!("{} exists", layer.display()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

fn describe(path: &Path, layer: &Arc<Layer>, paused: Duration) -> Result<SealedLayer> {
    let size = layer
        .source()
        .len()
        .map_err(|error| Error::io(format_args!("look at {}", path.display()), &error))?;
    Ok(SealedLayer {
        path: path.into(),
        uuid: layer.uuid(),
        parent_uuid: layer.parent_uuid(),
        virtual_size: layer.virtual_size(),
        records: layer.records(),
        data_bytes: layer.data_bytes(),
        size,
        paused,
    })
}
