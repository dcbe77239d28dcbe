//! The state directory: what each device is made of, one file per device, and the lock of the one daemon.
//!
//! Files are replaced atomically; whatever is read here was written here, and is checked all the same.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use overlaybd::Uuid;
use rustix::fs::{flock, FlockOperation};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::export::ExportRecord;

/// How an upper stores what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UpperMode {
    /// First writes are appended, later ones overwrite in place.
    #[default]
    Hybrid,
    /// A log.
    Append,
    /// Every sector has its fixed place.
    Sparse,
}

/// The writable layer of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpperRecord {
    /// Where its files are.
    pub directory: PathBuf,
    /// How it stores.
    pub mode: UpperMode,
    /// Bytes, as it was asked for; 0: that of the lowers.
    pub virtual_size: u64,
    /// Its files were made. Written down with the first export, before anybody can write to them. If they are missing now, data is lost: they must not be made again.
    pub created: bool,
}

/// A restack or seal that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestackRecord {
    /// Where the sealed layer goes.
    pub layer: PathBuf,
    /// The upper that is sealed.
    pub sealed: UuidText,
    /// The upper that takes its place; none for a seal.
    pub fresh: Option<UuidText>,
}

/// A UUID as text in the state file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UuidText(pub Uuid);

impl Serialize for UuidText {
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for UuidText {
    fn deserialize<D: serde::Deserializer<'de>>(
        deserializer: D,
    ) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

/// What a device is made of and how it is exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRecord {
    /// Of this file's format.
    pub version: u32,
    /// Name.
    pub device: String,
    /// Sealed layers, bottom first.
    pub lowers: Vec<PathBuf>,
    /// The writable layer.
    pub upper: Option<UpperRecord>,
    /// How often a read-only device is open.
    pub opens: u64,
    /// How it is exported.
    pub exports: Vec<ExportRecord>,
    /// A restack or seal that is under way.
    pub restack: Option<RestackRecord>,
    /// The device is being closed and its upper deleted.
    pub removing: bool,
}

/// Of [`DeviceRecord`].
pub const VERSION: u32 = 1;

/// What must have happened when a write returns. The file is whole in either case, old or new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// After a crash of the host, too, the file has the new content.
    Host,
    /// After a crash of the host it may have the old one: for what does not outlive such a crash anyway.
    Process,
}

/// The locked directory.
pub struct StateDirectory {
    devices: PathBuf,
    directory: File,
    _lock: File,
}

impl StateDirectory {
    /// Make the directory if need be and lock it.
    ///
    /// # Errors
    /// `Conflict` when another daemon has it, `Io`.
    pub fn open(path: &Path) -> Result<Self> {
        let devices = path.join("devices");
        let failed = |error: io::Error| {
            Error::io(
                format_args!("open the state directory {}", path.display()),
                &error,
            )
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&devices)
            .map_err(failed)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(failed)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::Conflict(format!(
                "another daemon uses the state directory {}; stop it, or name another directory",
                path.display()
            )))
            }
            Err(error) => return Err(failed(error.into())),
        }
        let directory = File::open(&devices).map_err(failed)?;
        Ok(Self {
            devices,
            directory,
            _lock: lock,
        })
    }

    /// All devices. A file that cannot be understood comes as its name and the reason; it is left as it is.
    ///
    /// # Errors
    /// `Io` when the directory cannot be read.
    pub fn load(&self) -> Result<Vec<std::result::Result<DeviceRecord, (String, Error)>>> {
        let failed =
            |error: io::Error| Error::io(format_args!("read {}", self.devices.display()), &error);
        let mut records = Vec::new();
        for entry in std::fs::read_dir(&self.devices).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if name.starts_with('.') {
                // What a killed daemon was about to rename.
                std::fs::remove_file(&path).map_err(failed)?;
            } else if let Some(device) = name.strip_suffix(".json") {
                records.push(read(&path, device).map_err(|error| (device.to_owned(), error)));
            }
        }
        Ok(records)
    }

    /// Write down what a device is.
    ///
    /// # Errors
    /// `NoSpace`, `Io`: the old content is there then.
    pub fn save(&self, record: &DeviceRecord, durability: Durability) -> Result<()> {
        let temporary = self.devices.join(format!(".{}.json", record.device));
        let path = self.path(&record.device);
        let result = (|| {
            let text = serde_json::to_vec_pretty(record)?;
            let mut file = OpenOptions::new()
                .create(true)
                .truncate(true)
                .write(true)
                .mode(0o600)
                .open(&temporary)?;
            file.write_all(&text)?;
            file.sync_data()?;
            std::fs::rename(&temporary, &path)?;
            if durability == Durability::Host {
                self.directory.sync_all()?;
            }
            Ok(())
        })();
        result.map_err(|error: io::Error| {
            // There may be nothing to remove; the next start removes the rest.
            let _ = std::fs::remove_file(&temporary);
            Error::io(format_args!("write {}", path.display()), &error)
        })
    }

    /// Forget a device. After a crash of the host it may be there again, as it was.
    ///
    /// # Errors
    /// `Io`.
    pub fn remove(&self, device: &str) -> Result<()> {
        let path = self.path(device);
        let result = match std::fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        };
        result.map_err(|error| Error::io(format_args!("remove {}", path.display()), &error))
    }

    fn path(&self, device: &str) -> PathBuf {
        self.devices.join(format!("{device}.json"))
    }
}

fn read(path: &Path, device: &str) -> Result<DeviceRecord> {
    let bytes = std::fs::read(path)
        .map_err(|error| Error::io(format_args!("read {}", path.display()), &error))?;
    let record: DeviceRecord = serde_json::from_slice(&bytes)
        .map_err(|error| Error::Internal(format!("{} is damaged: {error}", path.display())))?;
    if record.version != VERSION {
        return Err(Error::Unsupported(format!(
            "{} is of version {}, this daemon reads version {VERSION}",
            path.display(),
            record.version
        )));
    }
    if record.device != device {
        return Err(Error::Internal(format!(
            "{} describes another device",
            path.display()
        )));
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(device: &str) -> DeviceRecord {
        DeviceRecord {
            version: VERSION,
            device: device.into(),
            lowers: vec!["/layers/a".into()],
            upper: Some(UpperRecord {
                directory: "/disks/a".into(),
                mode: UpperMode::Hybrid,
                virtual_size: 4096,
                created: true,
            }),
            opens: 1,
            exports: vec![
                ExportRecord::Nbd {
                    path: "/run/a.sock".into(),
                },
                ExportRecord::KernelNbd {
                    connections: 2,
                    number: 3,
                },
            ],
            restack: Some(RestackRecord {
                layer: "/layers/b".into(),
                sealed: UuidText(Uuid::from_u128(1)),
                fresh: None,
            }),
            removing: false,
        }
    }

    #[test]
    fn what_is_saved_comes_back() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        state.save(&record("a"), Durability::Host).unwrap();
        state.save(&record("b"), Durability::Process).unwrap();
        std::fs::write(directory.path().join("devices/c.json"), "{").unwrap();
        std::fs::write(directory.path().join("devices/.d.json"), "{").unwrap();
        state.remove("b").unwrap();
        state.remove("b").unwrap();
        let mut loaded = state.load().unwrap();
        loaded.sort_by_key(|entry| entry.is_err());
        assert_eq!(loaded.len(), 2);
        assert_eq!(loaded[0].as_ref().unwrap(), &record("a"));
        assert_eq!(loaded[1].as_ref().unwrap_err().0, "c");
        assert!(!directory.path().join("devices/.d.json").exists());
    }

    #[test]
    fn there_is_one_daemon_per_directory() {
        let directory = tempfile::tempdir().unwrap();
        let first = StateDirectory::open(directory.path()).unwrap();
        let Err(error) = StateDirectory::open(directory.path()) else {
            panic!("opened twice");
        };
        assert_eq!(error.code(), "conflict");
        drop(first);
        StateDirectory::open(directory.path()).unwrap();
    }
}
