//! The start: devices that a daemon before had are opened and exported again.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, PoisonError};

use super::{in_parallel, Daemon, Device, Slot};
use crate::device::uppers::{Interrupted, UpperDirectory};
use crate::error::{Error, Result};
use crate::events::Event;
use crate::export::Start;
use crate::state::{DeviceRecord, Durability, VERSION};

impl Daemon {
    pub(super) fn recover(&self) -> Result<()> {
        let mut found = Vec::new();
        for entry in self.state.load()? {
            let device = match entry {
                Ok(record) => Device {
                    record,
                    open: None,
                    error: None,
                },
                // Its file is left alone, and its name is taken.
                Err((name, error)) => Device {
                    record: DeviceRecord {
                        version: VERSION,
                        device: name,
                        lowers: Vec::new(),
                        upper: None,
                        opens: 0,
                        exports: Vec::new(),
                        restack: None,
                        removing: false,
                    },
                    open: None,
                    error: Some(error),
                },
            };
            let slot = Slot::new();
            let name = device.record.device.clone();
            slot.show(Some(&device));
            *slot.lock() = Some(device);
            found.push((name, slot));
        }
        self.devices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(
                found
                    .iter()
                    .map(|(name, slot)| (name.clone(), Arc::clone(slot))),
            );
        in_parallel(found, |(name, slot)| {
            let mut guard = slot.lock();
            let Some(device) = guard.as_mut() else { return };
            if device.error.is_none() {
                // A device that trips over a defect must not keep the others from coming back.
                let recovered = catch_unwind(AssertUnwindSafe(|| self.recover_device(device)))
                    .unwrap_or_else(|_| {
                        Err(Error::Internal(
                            "a defect of the daemon, see its log".into(),
                        ))
                    });
                match recovered {
                    Ok(()) if device.record.removing => {
                        *guard = None;
                        self.devices
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .remove(&name);
                        return;
                    }
                    Ok(()) => {}
                    Err(error) => device.error = Some(error),
                }
            }
            if let Some(error) = &device.error {
                tracing::error!(device = %name, %error, "cannot open a device again");
                self.events.publish(&Event::Failed {
                    device: name,
                    message: error.to_string(),
                });
            }
            slot.show(guard.as_ref());
        });
        Ok(())
    }

    /// Open a device as its record says, with its exports. When it was being removed, remove it.
    pub(super) fn recover_device(&self, device: &mut Device) -> Result<()> {
        if device.record.removing {
            return self.remove(device);
        }
        device.error = None;
        self.recover_restack(&mut device.record)?;
        let mut open = self.open_parts(&mut device.record)?;
        let name = device.record.device.clone();
        for record in device.record.exports.clone() {
            match self.start_export(&name, &open.device, &record, Start::Recover) {
                Ok(export) => open.exports.push(export),
                // The others are of use all the same.
                Err(error) => device.error = Some(error),
            }
        }
        device.open = Some(open);
        Ok(())
    }

    fn recover_restack(&self, record: &mut DeviceRecord) -> Result<()> {
        let (Some(restack), Some(upper)) = (record.restack.clone(), record.upper.clone()) else {
            return Ok(());
        };
        let outcome = UpperDirectory::lock(&upper)?.recover(&restack)?;
        tracing::info!(device = %record.device, ?outcome, "a restack was interrupted");
        if outcome == Interrupted::Finished {
            record.lowers.push(restack.layer);
            if restack.fresh.is_none() {
                record.upper = None;
            }
        }
        record.restack = None;
        self.state.save(record, Durability::Host)
    }

    /// What subscribers missed because it happened before anyone could subscribe.
    #[must_use]
    pub fn failures(&self) -> Vec<Event> {
        let views = self.slots().into_iter().filter_map(|(_, slot)| slot.view());
        views
            .filter_map(|view| {
                let error: &Error = view.error.as_ref()?;
                Some(Event::Failed {
                    device: view.record.device.clone(),
                    message: error.to_string(),
                })
            })
            .collect()
    }
}
