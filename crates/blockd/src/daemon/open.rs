//! Opening and closing devices.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use overlaybd::stack::Stack;

use super::{no_such_device, Daemon, Device, OpenDevice, Slot};
use crate::device::uppers::UpperDirectory;
use crate::device::StackDevice;
use crate::error::{Error, Result};
use crate::export::Stop;
use crate::fail_point::fail_point;
use crate::state::{DeviceRecord, Durability, UpperMode, UpperRecord, VERSION};

impl Daemon {
    /// Open a device, or find it open with the same parts.
    ///
    /// # Errors
    /// `Conflict` when it is open with other parts or its files are in use, `BadRequest`, `NotFound`, `BadLayer`,
    /// `NoSpace`, `Io`.
    pub fn open(&self, name: &str, lowers: Vec<PathBuf>, upper: Option<UpperRecord>) -> Result<()> {
        check_parts(&lowers, upper.as_ref())?;
        self.refuse_at_end()?;
        loop {
            let slot = {
                let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
                Arc::clone(devices.entry(name.to_owned()).or_insert_with(Slot::new))
            };
            let mut guard = slot.lock();
            // Whoever closed the device meanwhile has thrown the slot away.
            if !self
                .slot(name)
                .is_some_and(|current| Arc::ptr_eq(&current, &slot))
            {
                continue;
            }
            let result = match guard.as_mut() {
                Some(device) => self.open_again(device, &lowers, upper.as_ref()),
                None => self
                    .open_new(name, lowers, upper)
                    .map(|device| *guard = Some(device)),
            };
            slot.show(guard.as_ref());
            if guard.is_none() {
                self.forget(name);
            }
            return result;
        }
    }

    /// End a device's exports, flush it, and forget it. A read-only device goes with its last user.
    ///
    /// # Errors
    /// `NotFound`, `Io` when it cannot be flushed: the device stays then, without exports.
    pub fn close(&self, name: &str, remove_upper: bool) -> Result<()> {
        self.refuse_at_end()?;
        let slot = self.slot(name).ok_or_else(|| no_such_device(name))?;
        let mut guard = slot.lock();
        let device = guard.as_mut().ok_or_else(|| no_such_device(name))?;
        let result = self.close_device(name, device, remove_upper);
        if matches!(result, Ok(true)) {
            *guard = None;
            slot.show(None);
            self.forget(name);
        } else {
            slot.show(guard.as_ref());
        }
        result.map(|_| ())
    }

    /// `true` when the device is gone.
    fn close_device(&self, name: &str, device: &mut Device, remove_upper: bool) -> Result<bool> {
        if device.record.upper.is_none() && device.record.opens > 1 {
            device.record.opens -= 1;
            self.state.save(&device.record, Durability::Process)?;
            return Ok(false);
        }
        let remove_upper = remove_upper && device.record.upper.is_some();
        if remove_upper {
            // From here on a killed daemon goes on with removing.
            device.record.removing = true;
            match self.state.save(&device.record, Durability::Host) {
                // Removing is what makes room. If this daemon is killed before it is done, the next one finds a device
                // whose upper is missing, and it can be closed then.
                Err(Error::NoSpace(_)) => {}
                result => result?,
            }
            fail_point("closing");
        } else if let Some(open) = device.open.as_mut() {
            self.finish_restack(name, &mut device.record, open)?;
        }
        if let Some(open) = device.open.as_mut() {
            for export in std::mem::take(&mut open.exports) {
                if let Err(error) = export.stop(Stop::Remove) {
                    tracing::warn!(device = %name, %error, "closing an export");
                }
            }
            if !remove_upper {
                open.flush(name)?;
            }
        }
        self.remove(device)?;
        Ok(true)
    }

    /// Remove what a device has on disk, as its record says.
    pub(super) fn remove(&self, device: &mut Device) -> Result<()> {
        // Whatever is in use is released first.
        let upper = device.open.take().and_then(|open| open.upper);
        for export in &device.record.exports {
            crate::export::remove_left(&device.record.device, export)?;
        }
        if let (true, Some(record)) = (device.record.removing, &device.record.upper) {
            if record.directory.exists() {
                match upper {
                    Some(upper) => upper.delete()?,
                    None => UpperDirectory::lock(record)?.delete()?,
                }
            }
        }
        self.state.remove(&device.record.device)
    }

    /// Throw the slot away. The caller holds its lock.
    fn forget(&self, name: &str) {
        self.devices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(name);
    }

    fn open_again(
        &self,
        device: &mut Device,
        lowers: &[PathBuf],
        upper: Option<&UpperRecord>,
    ) -> Result<()> {
        let record = &mut device.record;
        let same_upper = match (&record.upper, upper) {
            (None, None) => true,
            (Some(is), Some(wanted)) => {
                let size = device
                    .open
                    .as_ref()
                    .map_or(is.virtual_size, |open| open.device.stack().virtual_size());
                is.directory == wanted.directory
                    && is.mode == wanted.mode
                    && [0, is.virtual_size, size].contains(&wanted.virtual_size)
            }
            _ => false,
        };
        if record.removing || record.lowers != lowers || !same_upper {
            return Err(Error::Conflict(format!(
                "{} is open with other layers, another upper or another size",
                record.device
            )));
        }
        if device.open.is_none() {
            self.recover_device(device)?;
        }
        if device.record.upper.is_none() {
            device.record.opens += 1;
            self.state.save(&device.record, Durability::Process)?;
        }
        Ok(())
    }

    fn open_new(
        &self,
        name: &str,
        lowers: Vec<PathBuf>,
        upper: Option<UpperRecord>,
    ) -> Result<Device> {
        let mut device = Device {
            record: DeviceRecord {
                version: VERSION,
                device: name.to_owned(),
                lowers,
                upper,
                opens: 1,
                exports: Vec::new(),
                restack: None,
                removing: false,
            },
            open: None,
            error: None,
        };
        let existed = device
            .record
            .upper
            .as_ref()
            .is_some_and(UpperDirectory::has_files);
        self.state.save(&device.record, Durability::Host)?;
        match self.open_parts(&mut device.record) {
            Ok(open) => {
                device.open = Some(open);
                Ok(device)
            }
            Err(error) => {
                // An upper that was there before is not ours to delete.
                device.record.removing = !existed && !matches!(error, Error::Conflict(_));
                if let Err(left) = self.remove(&mut device) {
                    tracing::error!(device = %name, error = %left, "what is left of a failed open stays");
                    self.state.remove(name)?;
                }
                Err(error)
            }
        }
    }

    /// Open layers and upper as the record has them, and make the upper if it was never made.
    pub(super) fn open_parts(&self, record: &mut DeviceRecord) -> Result<OpenDevice> {
        let lowers = self.layers.open_all(&record.lowers)?;
        let mut upper_directory = None;
        let mut upper = None;
        if let Some(upper_record) = record.upper.as_mut() {
            let mut directory = UpperDirectory::lock(upper_record)?;
            let below = lowers.layers().last().map(|layer| layer.uuid());
            let opened =
                directory.open_or_create(upper_record, below.filter(|uuid| !uuid.is_nil()))?;
            if opened.virtual_size() == 0
                && upper_record.virtual_size == 0
                && lowers.virtual_size() == 0
            {
                directory.delete()?;
                return Err(Error::BadRequest(format!(
                    "{}: neither the layers nor the request say how large the device is",
                    record.device
                )));
            }
            upper = Some(opened);
            upper_directory = Some(directory);
        }
        let stack = Stack::open(lowers, upper)
            .map_err(|error| Error::layer(format_args!("open {}", record.device), error))?;
        if let Some(upper) = record.upper.as_mut() {
            upper.created = true;
        }
        Ok(OpenDevice {
            device: Arc::new(StackDevice::new(
                record.device.clone(),
                stack,
                self.events.clone(),
            )),
            upper: upper_directory,
            exports: Vec::new(),
        })
    }
}

fn check_parts(lowers: &[PathBuf], upper: Option<&UpperRecord>) -> Result<()> {
    let Some(upper) = upper else {
        if lowers.is_empty() {
            return Err(Error::BadRequest(
                "a device has at least one layer or an upper".into(),
            ));
        }
        return Ok(());
    };
    if upper.mode == UpperMode::Sparse && !lowers.is_empty() {
        return Err(Error::BadRequest(
            "a sparse upper forgets discards when it is opened again; it cannot be put on layers"
                .into(),
        ));
    }
    if upper.virtual_size % crate::backend::SECTOR != 0 {
        return Err(Error::BadRequest(
            "virtual_size must be a multiple of 512".into(),
        ));
    }
    if upper.virtual_size == 0 && lowers.is_empty() {
        return Err(Error::BadRequest(
            "virtual_size is needed where there are no layers".into(),
        ));
    }
    Ok(())
}
