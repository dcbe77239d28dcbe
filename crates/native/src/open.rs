//! Opens the files that a call names: layers, stacks of them, images, and uppers that are only looked at.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use overlaybd::io::{ReadAt, WriteAt};
use overlaybd::probe::{open_layer, Opened};
use overlaybd::stack::{Lowers, Stack};
use overlaybd::upper::Upper;

use crate::failure::{About, Failure, Outcome};
use crate::interruptible::Cancel;

/// A file of the call; its reads fail once the call is to end.
pub struct Source {
    file: File,
    cancel: Arc<Cancel>,
}

impl Source {
    /// Open a plain file. Anything else is refused before it is opened: a pipe would wait for its writer.
    pub fn open(path: &Path, cancel: &Arc<Cancel>) -> Outcome<Self> {
        if !fs::metadata(path).about(path)?.is_file() {
            return Err(Failure::invalid(format!(
                "{} is not a plain file",
                path.display()
            )));
        }
        let file = File::open(path).about(path)?;
        Ok(Self {
            file,
            cancel: Arc::clone(cancel),
        })
    }

    /// The file, for all that is not reading.
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl ReadAt for Source {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.cancel.check()?;
        ReadAt::read_exact_at(&self.file, buffer, offset)
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn try_read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        self.file.try_read_exact_at(buffer, offset)
    }
}

/// Open a sealed layer, whatever it is wrapped in.
pub fn sealed_layer(path: &Path, cancel: &Arc<Cancel>) -> Outcome<Opened> {
    open_layer(Arc::new(Source::open(path, cancel)?)).about(path)
}

/// Open layers, bottom first, under one index. None at all are fine.
pub fn lowers(paths: &[PathBuf], cancel: &Arc<Cancel>) -> Outcome<Arc<Lowers>> {
    let mut layers = Vec::with_capacity(paths.len());
    for path in paths {
        layers.push(Arc::new(sealed_layer(path, cancel)?.layer));
    }
    let top = paths.last().map_or(Path::new("stack"), PathBuf::as_path);
    Lowers::merge(layers).about(top)
}

/// Open a read-only device made of at least one layer.
pub fn stack(paths: &[PathBuf], cancel: &Arc<Cancel>) -> Outcome<Stack> {
    let Some(top) = paths.last() else {
        return Err(Failure::invalid("a stack needs at least one layer"));
    };
    Stack::open(lowers(paths, cancel)?, None).about(top)
}

/// Open an upper without changing its files: what recovery would cut off is only ignored.
pub fn upper(data: &Path, index: Option<&Path>, cancel: &Arc<Cancel>) -> Outcome<Upper> {
    let view = |path: &Path| -> Outcome<Box<dyn WriteAt>> {
        let source = Source::open(path, cancel)?;
        let length = AtomicU64::new(source.len().about(path)?);
        Ok(Box::new(Unchanged { source, length }))
    };
    let data_view = view(data)?;
    let index_view = index.map(view).transpose()?;
    Upper::open(data_view, index_view).about(data)
}

/// A file that may be shortened in appearance, but not changed.
struct Unchanged {
    source: Source,
    length: AtomicU64,
}

impl ReadAt for Unchanged {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.length.load(Ordering::Relaxed)) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.source.read_exact_at(buffer, offset)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.length.load(Ordering::Relaxed))
    }
}

impl WriteAt for Unchanged {
    fn write_all_at(&self, _buffer: &[u8], _offset: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        if length > self.len()? {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        self.length.store(length, Ordering::Relaxed);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch_hole(&self, _range: Range<u64>) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn data_extents(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        self.source.file().data_extents(range)
    }
}
