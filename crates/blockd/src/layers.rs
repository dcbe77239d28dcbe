//! Sealed layers that are open, each once, however many devices stand on it; and the merged indexes of lists of them.
//!
//! A layer is known by its file (device and inode): the same file under two names is one layer. Nothing here keeps a layer
//! open: the last device that uses it does.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use overlaybd::layer::Layer;
use overlaybd::probe;
use overlaybd::stack::{Lowers, MAX_LAYERS};

use crate::error::{Error, Result};

/// `O_NONBLOCK` as the standard library wants it.
#[allow(clippy::cast_possible_wrap)]
const NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits() as i32;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct FileId {
    device: u64,
    inode: u64,
}

/// The cache.
#[derive(Default)]
pub struct Layers {
    files: Mutex<HashMap<FileId, Arc<Entry<Layer>>>>,
    /// By the addresses of the layers, which stay theirs as long as the merged index holds them.
    merged: Mutex<HashMap<Vec<usize>, Arc<Entry<Lowers>>>>,
}

/// A place in the cache. Its lock is held while the thing is opened, so that others wait and find it.
struct Entry<T>(Mutex<Weak<T>>);

impl<T> Default for Entry<T> {
    fn default() -> Self {
        Self(Mutex::new(Weak::new()))
    }
}

impl<T> Entry<T> {
    fn lock(&self) -> MutexGuard<'_, Weak<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get_or_open(&self, open: impl FnOnce() -> Result<Arc<T>>) -> Result<Arc<T>> {
        let mut place = self.lock();
        if let Some(there) = place.upgrade() {
            return Ok(there);
        }
        let opened = open()?;
        *place = Arc::downgrade(&opened);
        Ok(opened)
    }

    /// Nobody uses it and nobody is about to.
    fn is_dead(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) == 1 && self.lock().strong_count() == 0
    }
}

/// The entry for a key; dead ones are dropped on the way when there are many.
fn entry<K: Eq + std::hash::Hash, T>(
    map: &Mutex<HashMap<K, Arc<Entry<T>>>>,
    key: K,
) -> Arc<Entry<T>> {
    let mut map = map.lock().unwrap_or_else(PoisonError::into_inner);
    if map.len() == map.capacity() {
        map.retain(|_, entry| !entry.is_dead());
    }
    Arc::clone(map.entry(key).or_default())
}

impl Layers {
    /// Open the layers at `paths`, bottom first, and merge their indexes.
    ///
    /// # Errors
    /// `NotFound`, `BadLayer`, `Io`: for the first that cannot be opened.
    pub fn open_all(&self, paths: &[PathBuf]) -> Result<Arc<Lowers>> {
        if paths.len() > MAX_LAYERS {
            return Err(Error::BadLayer(format!(
                "{} layers; a stack has at most {MAX_LAYERS}",
                paths.len()
            )));
        }
        let layers = paths
            .iter()
            .map(|path| self.open(path))
            .collect::<Result<Vec<_>>>()?;
        let key = layers
            .iter()
            .map(|layer| Arc::as_ptr(layer) as usize)
            .collect();
        entry(&self.merged, key).get_or_open(|| {
            Lowers::merge(layers).map_err(|error| Error::layer("merge the layers' indexes", error))
        })
    }

    /// Open the layer at `path`, in whatever wrappers.
    ///
    /// # Errors
    /// `NotFound`, `BadLayer`, `Io`.
    pub fn open(&self, path: &Path) -> Result<Arc<Layer>> {
        let failed = |error| Error::io(format_args!("open the layer {}", path.display()), &error);
        // Without blocking: whoever names a pipe gets an error, not a daemon that waits for its other end.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(NONBLOCK)
            .open(path)
            .map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(Error::BadLayer(format!(
                "{} is no regular file",
                path.display()
            )));
        }
        entry(&self.files, id(&file).map_err(failed)?).get_or_open(|| {
            let opened = probe::open_layer(Arc::new(file)).map_err(|error| {
                Error::layer(format_args!("open the layer {}", path.display()), error)
            })?;
            Ok(Arc::new(opened.layer))
        })
    }

    /// `layer`, which was made here, is the file `file`: devices that name it get this one.
    pub fn insert(&self, file: &File, layer: &Arc<Layer>) {
        if let Ok(id) = id(file) {
            *entry(&self.files, id).lock() = Arc::downgrade(layer);
        }
    }

    /// Layers that are open now.
    #[must_use]
    pub fn count(&self) -> usize {
        let entries: Vec<_> = {
            let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            files.values().cloned().collect()
        };
        // A layer that is being opened right now does not count; its lock is held meanwhile.
        entries
            .iter()
            .filter(|entry| {
                entry
                    .0
                    .try_lock()
                    .is_ok_and(|layer| layer.strong_count() > 0)
            })
            .count()
    }
}

fn id(file: &File) -> std::io::Result<FileId> {
    let metadata = file.metadata()?;
    Ok(FileId {
        device: metadata.dev(),
        inode: metadata.ino(),
    })
}
