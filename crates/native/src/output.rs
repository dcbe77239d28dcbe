//! The file that a call makes: it has no name until it is whole and on stable storage, and its sha256 is known then.
//!
//! A call that fails, is interrupted or killed leaves nothing (on a file system without unnamed files, a kill leaves a
//! file whose name begins with a dot and ends in `.partial`).

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, CWD};
use rustix::io::Errno;

use crate::digest::{hash_file, BackgroundDigest, PIECE_BYTES};
use crate::failure::{About, Failure, Outcome};
use crate::interruptible::Cancel;

/// How an output is made.
#[derive(Clone, Copy)]
pub struct Options {
    /// Take the place of a file of that name, at the end and at once.
    pub replace: bool,
    /// Permissions, from which the process's umask takes.
    pub mode: u32,
    /// Take the digest: while writing where that is possible.
    pub digest: bool,
}

/// A finished output.
pub struct Published {
    /// `sha256:<hex>`; `None` when it was not asked for.
    pub digest: Option<String>,
    /// Bytes.
    pub size: u64,
}

/// A file in the making: a buffered, seekable sink. Dropped before [`Output::publish`], it leaves nothing.
pub struct Output<'a> {
    file: File,
    path: PathBuf,
    /// Its name meanwhile, where it needs one.
    temporary: Option<PathBuf>,
    options: Options,
    cancel: &'a Cancel,
    buffer: Vec<u8>,
    /// Where the buffer goes.
    position: u64,
    digest: Option<BackgroundDigest>,
}

impl<'a> Output<'a> {
    /// Begin a file that will be called `path`.
    pub fn create(path: &Path, options: Options, cancel: &'a Cancel) -> Outcome<Self> {
        match fs::symlink_metadata(path) {
            Ok(_) if !options.replace => return Err(Failure::exists(path)),
            Ok(metadata) if !metadata.is_file() => {
                return Err(Failure::invalid(format!(
                    "{} is not a plain file",
                    path.display()
                )))
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).about(path),
            _ => {}
        }
        if path.file_name().is_none() {
            return Err(Failure::invalid(format!(
                "{} is not the name of a file",
                path.display()
            )));
        }
        let (file, temporary) = open_unnamed(path, options.mode).about(path)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            temporary,
            options,
            cancel,
            buffer: Vec::with_capacity(PIECE_BYTES),
            position: 0,
            digest: options.digest.then(BackgroundDigest::start),
        })
    }

    /// Say that parts will be written twice, so that a digest taken meanwhile would be for nothing.
    pub fn written_twice(mut self) -> Self {
        self.digest = None;
        self
    }

    /// The file itself, for positioned writes by several threads. Not to be mixed with the sink.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Make all durable and give the file its name.
    pub fn publish(mut self) -> Outcome<Published> {
        let path = self.path.clone();
        self.finish().about(&path)
    }

    fn finish(&mut self) -> io::Result<Published> {
        self.write_buffer()?;
        let size = self.file.metadata()?.len();
        let digest = match self.digest.take() {
            Some(digest) => Some(digest.finish()?),
            None if self.options.digest => Some(hash_file(&self.file, self.cancel)?),
            None => None,
        };
        self.file.sync_all()?;
        self.cancel.check()?;
        let directory = File::open(directory_of(&self.path))?;
        self.name()?;
        if let Err(error) = directory.sync_all() {
            if !self.options.replace {
                // The error that is told is the one that matters.
                let _ = fs::remove_file(&self.path);
            }
            return Err(error);
        }
        Ok(Published { digest, size })
    }

    fn name(&mut self) -> io::Result<()> {
        if self.temporary.is_none() && !self.options.replace {
            return link_unnamed(&self.file, &self.path);
        }
        let temporary = match self.temporary.clone() {
            Some(temporary) => temporary,
            None => {
                let temporary = temporary_name(&self.path);
                link_unnamed(&self.file, &temporary)?;
                self.temporary.insert(temporary).clone()
            }
        };
        if self.options.replace {
            fs::rename(&temporary, &self.path)?;
        } else {
            rename_without_replacing(&temporary, &self.path)?;
        }
        self.temporary = None;
        Ok(())
    }

    fn write_buffer(&mut self) -> io::Result<()> {
        self.cancel.check()?;
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.file.write_all_at(&self.buffer, self.position)?;
        self.position += self.buffer.len() as u64;
        match &mut self.digest {
            Some(digest) => digest.take_in(&mut self.buffer)?,
            None => self.buffer.clear(),
        }
        Ok(())
    }
}

impl Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(PIECE_BYTES - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..count]);
        if self.buffer.len() == PIECE_BYTES {
            self.write_buffer()?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_buffer()
    }
}

impl Seek for Output<'_> {
    fn seek(&mut self, target: SeekFrom) -> io::Result<u64> {
        let here = self.position + self.buffer.len() as u64;
        let position = match target {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::Current(distance) => here.checked_add_signed(distance),
            SeekFrom::End(distance) => {
                self.write_buffer()?;
                self.file.metadata()?.len().checked_add_signed(distance)
            }
        }
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "seek out of range"))?;
        if position != here {
            self.write_buffer()?;
            self.position = position;
            self.digest = None; // taken of the whole file at the end
        }
        Ok(position)
    }
}

impl Drop for Output<'_> {
    fn drop(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            // Nobody is left to tell; the name says what it is.
            let _ = fs::remove_file(temporary);
        }
    }
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn temporary_name(path: &Path) -> PathBuf {
    directory_of(path).join(format!(".{}.partial", uuid::Uuid::new_v4()))
}

/// A file without a name where the file system has such, else one with a name that is to be removed.
fn open_unnamed(path: &Path, mode: u32) -> io::Result<(File, Option<PathBuf>)> {
    let mode = Mode::from_raw_mode(mode);
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(directory_of(path), flags | OFlags::TMPFILE, mode) {
        Ok(file) => return Ok((File::from(file), None)),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
        Err(error) => return Err(error.into()),
    }
    let temporary = temporary_name(path);
    let file = rustix::fs::open(&temporary, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    Ok((File::from(file), Some(temporary)))
}

fn link_unnamed(file: &File, path: &Path) -> io::Result<()> {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, unnamed, CWD, path, AtFlags::SYMLINK_FOLLOW).map_err(io::Error::from)
}

/// A plain rename would take the place of what has come meanwhile.
fn rename_without_replacing(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => {
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        other => other.map_err(io::Error::from),
    }
}
