//! The files of an upper: their names, locks, creation, the renames of a restack, and what to do when one was interrupted.
//!
//! `upper.data` and `upper.index` are the upper that is written to. `next.data` and `next.index` exist while one is being
//! made: for a new device, or as the fresh one of a restack. Both are complete before they get their final names, the index
//! first, so that where there is an `upper.data` there is all of it.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use overlaybd::header::{Header, HEADER_BYTES};
use overlaybd::io::WriteAt;
use overlaybd::upper::{Mode, Upper, UpperOptions};
use overlaybd::Uuid;
use rustix::fs::{flock, FlockOperation, RenameFlags};

use crate::error::{Error, Result};
use crate::fail_point::fail_point;
use crate::state::{RestackRecord, UpperMode, UpperRecord};

const DATA: &str = "upper.data";
const INDEX: &str = "upper.index";
const NEXT_DATA: &str = "next.data";
const NEXT_INDEX: &str = "next.index";

/// The locked directory of an upper.
pub struct UpperDirectory {
    path: PathBuf,
    /// Locked, so that no other daemon makes files here.
    directory: File,
    /// The data file. Locked as well, for tools that know only the file.
    data: Option<File>,
    mode: UpperMode,
}

/// What became of a restack or seal that was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupted {
    /// The upper is as it was.
    Undone,
    /// The layer is where it should be, and the fresh upper in its place.
    Finished,
}

impl UpperDirectory {
    /// Make the directory if need be and lock it.
    ///
    /// # Errors
    /// `Conflict` when another process has it, `NoSpace`, `Io`.
    pub fn lock(record: &UpperRecord) -> Result<Self> {
        let path = record.directory.clone();
        let failed = |error: io::Error| Error::io(format_args!("open {}", path.display()), &error);
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(error)),
        }
        let directory = File::open(&path).map_err(failed)?;
        lock(&directory, &path)?;
        Ok(Self {
            path,
            directory,
            data: None,
            mode: record.mode,
        })
    }

    /// Whether there is an upper already.
    #[must_use]
    pub fn has_files(record: &UpperRecord) -> bool {
        record.directory.join(DATA).exists()
    }

    /// Open the upper, or make it if `record` says that it was not made yet. It stands on the
    /// layer `parent_uuid` then.
    ///
    /// # Errors
    /// `NotFound` when files that were made are missing, `Conflict` when another process has them, `BadLayer`, `NoSpace`,
    /// `Io`.
    pub fn open_or_create(
        &mut self,
        record: &UpperRecord,
        parent_uuid: Option<Uuid>,
    ) -> Result<Upper> {
        if self.header(DATA)?.is_some() {
            return self.open();
        }
        if record.created {
            return Err(Error::NotFound(format!(
                "{} is missing or empty; what was written to this device is lost",
                self.path.join(DATA).display()
            )));
        }
        self.delete()?;
        let upper = self.create_next(UpperOptions {
            mode: self.library_mode(),
            virtual_size: record.virtual_size,
            uuid: None,
            parent_uuid,
            user_tag: Vec::new(),
        })?;
        self.promote_next()?;
        Ok(upper)
    }

    fn open(&mut self) -> Result<Upper> {
        let path = self.path.join(DATA);
        let data = self.open_file(DATA)?;
        lock(&data, &path)?;
        let index = self
            .has_index()
            .then(|| self.open_file(INDEX))
            .transpose()?;
        let handle = data
            .try_clone()
            .map_err(|error| Error::io(path.display(), &error))?;
        let upper = Upper::open(
            Box::new(data),
            index.map(|file| Box::new(file) as Box<dyn WriteAt>),
        )
        .map_err(|error| match error {
            overlaybd::Error::Invalid(message) => {
                Error::BadLayer(format!("{}: {message}", path.display()))
            }
            error => Error::layer(path.display(), error),
        })?;
        if upper.mode() != self.library_mode() {
            return Err(Error::Conflict(format!(
                "{} is an upper of another mode ({:?})",
                path.display(),
                upper.mode()
            )));
        }
        self.data = Some(handle);
        self.remove_file(NEXT_DATA)?;
        self.remove_file(NEXT_INDEX)?;
        Ok(upper)
    }

    /// Make an upper under the names `next.*`.
    ///
    /// # Errors
    /// `NoSpace`, `Io`, `BadLayer` for a size beyond the format's.
    pub fn create_next(&mut self, options: UpperOptions) -> Result<Upper> {
        self.remove_file(NEXT_DATA)?;
        self.remove_file(NEXT_INDEX)?;
        let result = (|| {
            let data = self.create_file(NEXT_DATA)?;
            lock(&data, &self.path.join(NEXT_DATA))?;
            let index = self
                .has_index()
                .then(|| self.create_file(NEXT_INDEX))
                .transpose()?;
            let handle = data
                .try_clone()
                .map_err(|error| Error::io(self.path.display(), &error))?;
            let index = index.map(|file| Box::new(file) as Box<dyn WriteAt>);
            let upper = Upper::create(Box::new(data), index, options).map_err(|error| {
                Error::layer(
                    format_args!("make an upper in {}", self.path.display()),
                    error,
                )
            })?;
            Ok((upper, handle))
        })();
        match result {
            Ok((upper, handle)) => {
                // The old one stays locked through the stack, which has it open until it is sealed.
                self.data = Some(handle);
                Ok(upper)
            }
            Err(error) => {
                self.discard_next();
                Err(error)
            }
        }
    }

    /// Remove `next.*`, which nobody uses.
    pub fn discard_next(&self) {
        for name in [NEXT_DATA, NEXT_INDEX] {
            if let Err(error) = self.remove_file(name) {
                tracing::warn!(%error, "what is left of a failed restack stays");
            }
        }
    }

    /// Give `next.*` their final names.
    ///
    /// # Errors
    /// `Io`.
    pub fn promote_next(&self) -> Result<()> {
        if self.has_index() {
            self.rename(NEXT_INDEX, INDEX)?;
        }
        fail_point("promoting");
        self.rename(NEXT_DATA, DATA)
    }

    /// Options for the fresh upper of a restack.
    #[must_use]
    pub fn fresh_options(&self, uuid: Uuid) -> UpperOptions {
        UpperOptions {
            mode: self.library_mode(),
            virtual_size: 0,
            uuid: Some(uuid),
            parent_uuid: None,
            user_tag: Vec::new(),
        }
    }

    /// The data file as it is open now, for its locks and its size.
    ///
    /// # Errors
    /// `Internal` when it is not open.
    pub fn data(&self) -> Result<File> {
        let data = self
            .data
            .as_ref()
            .ok_or_else(|| Error::Internal("no upper is open".into()))?;
        data.try_clone()
            .map_err(|error| Error::io(self.path.display(), &error))
    }

    /// Go back to `data` after [`UpperDirectory::create_next`], when the restack failed.
    pub fn keep(&mut self, data: File) {
        self.data = Some(data);
    }

    /// UUID of the upper that has the final name.
    ///
    /// # Errors
    /// `NotFound`, `BadLayer`, `Io`.
    pub fn uuid(&self) -> Result<Uuid> {
        match self.header(DATA)? {
            Some(header) => Ok(header.uuid),
            None => Err(Error::NotFound(format!(
                "{} is missing",
                self.path.join(DATA).display()
            ))),
        }
    }

    /// Move the sealed `upper.data` to `layer`, which must not exist.
    ///
    /// # Errors
    /// `Conflict` when something is there, `Io`.
    pub fn publish(&self, layer: &Path) -> Result<()> {
        let from = self.path.join(DATA);
        let result = rustix::fs::renameat_with(
            rustix::fs::CWD,
            &from,
            rustix::fs::CWD,
            layer,
            RenameFlags::NOREPLACE,
        );
        let result = match result {
            // The file system does not know the flag. Nobody else makes this file.
            Err(rustix::io::Errno::INVAL) if !layer.exists() => std::fs::rename(&from, layer),
            Err(rustix::io::Errno::EXIST | rustix::io::Errno::INVAL) => {
                return Err(Error::Conflict(format!("{} exists", layer.display())))
            }
            result => result.map_err(io::Error::from),
        };
        result.map_err(|error| {
            Error::io(
                format_args!("move the layer to {}", layer.display()),
                &error,
            )
        })
    }

    /// After a seal: the index file is of no use any more.
    ///
    /// # Errors
    /// `Io`.
    pub fn remove_index(&self) -> Result<()> {
        self.remove_file(INDEX)
    }

    /// Make the renames durable: of this directory and, with `layer`, of the one where that lies.
    ///
    /// # Errors
    /// `Io`.
    pub fn sync(&self, layer: Option<&Path>) -> Result<()> {
        let sync = || {
            self.directory.sync_all()?;
            match layer.and_then(Path::parent) {
                Some(parent) => File::open(parent)?.sync_all(),
                None => Ok(()),
            }
        };
        sync().map_err(|error| Error::io(format_args!("sync {}", self.path.display()), &error))
    }

    /// Bytes that the data file occupies on the disk.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        let metadata = self.data.as_ref().and_then(|data| data.metadata().ok());
        metadata.map_or(0, |metadata| metadata.blocks() * 512)
    }

    /// Delete the upper's files.
    ///
    /// # Errors
    /// `Io`.
    pub fn delete(&self) -> Result<()> {
        for name in [NEXT_DATA, NEXT_INDEX, DATA, INDEX] {
            self.remove_file(name)?;
        }
        Ok(())
    }

    /// Undo or finish a restack or seal that was interrupted. Only while nothing here is open.
    ///
    /// # Errors
    /// `BadLayer`, `Conflict` or `NotFound` when the files are in a state that no interruption leaves, `Io`.
    pub fn recover(&self, restack: &RestackRecord) -> Result<Interrupted> {
        let sealed = restack.sealed.0;
        let fresh = restack.fresh.map(|uuid| uuid.0);
        if let Some(header) = self.header(DATA)? {
            if Some(header.uuid) == fresh {
                // All was renamed, since the data file is the last.
                return self.finished(restack);
            }
            if header.uuid != sealed {
                return Err(self.strange("upper.data is neither the sealed nor the fresh upper"));
            }
            let file = self.open_file(DATA)?;
            let is_sealed = Upper::is_sealed(&file)
                .map_err(|error| Error::layer(self.path.join(DATA).display(), error))?;
            if !is_sealed {
                self.remove_file(NEXT_DATA)?;
                self.remove_file(NEXT_INDEX)?;
                return Ok(Interrupted::Undone);
            }
            file.sync_all().map_err(|error| {
                Error::io(
                    format_args!("sync {}", self.path.join(DATA).display()),
                    &error,
                )
            })?;
            self.publish(&restack.layer)?;
        } else if !restack.layer.exists() {
            return Err(self.strange("neither upper.data nor the layer exists"));
        }
        if let Some(fresh) = fresh {
            match self.header(NEXT_DATA)? {
                Some(header) if header.uuid == fresh => {}
                _ => return Err(self.strange("the fresh upper is missing or damaged")),
            }
            if self.has_index() && self.path.join(NEXT_INDEX).exists() {
                self.rename(NEXT_INDEX, INDEX)?;
            }
            self.rename(NEXT_DATA, DATA)?;
        } else {
            self.remove_index()?;
        }
        self.finished(restack)
    }

    fn finished(&self, restack: &RestackRecord) -> Result<Interrupted> {
        self.sync(Some(&restack.layer))?;
        Ok(Interrupted::Finished)
    }

    fn strange(&self, what: &str) -> Error {
        Error::BadLayer(format!(
            "{}: a restack was interrupted, and {what}; nothing was touched",
            self.path.display()
        ))
    }

    fn has_index(&self) -> bool {
        self.mode != UpperMode::Sparse
    }

    fn library_mode(&self) -> Mode {
        match self.mode {
            UpperMode::Hybrid => Mode::Hybrid,
            UpperMode::Append => Mode::Append,
            UpperMode::Sparse => Mode::Sparse,
        }
    }

    /// The header of a data file; `None` when it is missing or was never written.
    fn header(&self, name: &str) -> Result<Option<Header>> {
        let path = self.path.join(name);
        let file = match OpenOptions::new().read(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(format_args!("open {}", path.display()), &error)),
        };
        let mut bytes = [0; HEADER_BYTES];
        match std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let length = file.metadata().map_or(0, |metadata| metadata.len());
                if length == 0 {
                    return Ok(None);
                }
                return Err(Error::BadLayer(format!("{} is cut short", path.display())));
            }
            Err(error) => return Err(Error::io(format_args!("read {}", path.display()), &error)),
        }
        Header::decode(&bytes)
            .map(Some)
            .map_err(|error| Error::layer(path.display(), error))
    }

    fn open_file(&self, name: &str) -> Result<File> {
        let path = self.path.join(name);
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| Error::io(format_args!("open {}", path.display()), &error))
    }

    fn create_file(&self, name: &str) -> Result<File> {
        let path = self.path.join(name);
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|error| Error::io(format_args!("make {}", path.display()), &error))
    }

    fn remove_file(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        match std::fs::remove_file(&path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Error::io(format_args!("remove {}", path.display()), &error)),
        }
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        rustix::fs::renameat(&self.directory, from, &self.directory, to).map_err(|error| {
            Error::io(
                format_args!("rename {from} to {to} in {}", self.path.display()),
                &error.into(),
            )
        })
    }
}

impl Drop for UpperDirectory {
    fn drop(&mut self) {
        // The locks belong to the open files, which somebody who looks at the device may still have for a moment.
        for file in [Some(&self.directory), self.data.as_ref()]
            .into_iter()
            .flatten()
        {
            unlock(file);
        }
    }
}

/// Release the lock of a data file that has become a layer, which anyone may open.
pub fn unlock(data: &File) {
    if let Err(error) = flock(data, FlockOperation::Unlock) {
        tracing::warn!(%error, "cannot unlock a file");
    }
}

fn lock(file: &File, path: &Path) -> Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Conflict(format!(
            "{} is in use by another process or device",
            path.display()
        ))),
        Err(error) => Err(Error::io(
            format_args!("lock {}", path.display()),
            &error.into(),
        )),
    }
}
