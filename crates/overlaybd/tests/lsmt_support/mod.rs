//! What the tests of layers share: files in memory whose every change is recorded, and that can be full, fail, or crash.

#![allow(dead_code, reason = "each test file uses a part")]

pub mod base;
pub mod world;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use overlaybd::io::{ReadAt, WriteAt};
use overlaybd::layer::Layer;
use overlaybd::stack::{Lowers, Stack};
use overlaybd::upper::{Mode, Upper, UpperOptions};
use overlaybd::Uuid;
use sha2::{Digest, Sha256};

pub const SECTOR: usize = 512;

/// One change of a file.
#[derive(Debug, Clone)]
pub enum Change {
    Write {
        file: usize,
        offset: u64,
        bytes: Vec<u8>,
    },
    SetLen {
        file: usize,
        length: u64,
    },
    Punch {
        file: usize,
        range: Range<u64>,
    },
    Sync {
        file: usize,
    },
}

#[derive(Default)]
struct Content {
    files: Vec<Vec<u8>>,
    journal: Vec<Change>,
    /// Bytes that all files together may have.
    room: Option<u64>,
    /// Syncs that still succeed.
    syncs: Option<usize>,
}

/// A file system in memory.
#[derive(Clone, Default)]
pub struct Disk(Arc<Mutex<Content>>);

/// A file of a [`Disk`].
pub struct DiskFile {
    disk: Disk,
    number: usize,
}

impl Disk {
    pub fn file(&self) -> Box<DiskFile> {
        let mut content = self.0.lock().unwrap();
        content.files.push(Vec::new());
        Box::new(DiskFile {
            disk: self.clone(),
            number: content.files.len() - 1,
        })
    }

    /// The same file, opened again.
    pub fn reopen(&self, number: usize) -> Box<DiskFile> {
        Box::new(DiskFile {
            disk: self.clone(),
            number,
        })
    }

    pub fn bytes(&self, number: usize) -> Vec<u8> {
        self.0.lock().unwrap().files[number].clone()
    }

    pub fn journal(&self) -> Vec<Change> {
        self.0.lock().unwrap().journal.clone()
    }

    pub fn changes(&self) -> usize {
        self.0.lock().unwrap().journal.len()
    }

    pub fn used(&self) -> u64 {
        self.0.lock().unwrap().used()
    }

    /// Leave `free` bytes, or as many as one likes.
    pub fn set_free(&self, free: Option<u64>) {
        let mut content = self.0.lock().unwrap();
        content.room = free.map(|free| content.used() + free);
    }

    pub fn fail_syncs_after(&self, syncs: Option<usize>) {
        self.0.lock().unwrap().syncs = syncs;
    }

    /// All files as they are.
    pub fn contents(&self) -> Vec<Vec<u8>> {
        self.0.lock().unwrap().files.clone()
    }

    /// A disk with these files, on which these changes happened.
    pub fn after(files: Vec<Vec<u8>>, changes: &[Change]) -> Self {
        let mut content = Content {
            files,
            ..Content::default()
        };
        for change in changes {
            content.apply(change).unwrap();
        }
        Self(Arc::new(Mutex::new(content)))
    }
}

impl Content {
    fn used(&self) -> u64 {
        self.files.iter().map(|file| file.len() as u64).sum()
    }

    fn apply(&mut self, change: &Change) -> io::Result<()> {
        match change {
            Change::Write {
                file,
                offset,
                bytes,
            } => {
                let offset = usize::try_from(*offset).unwrap();
                let length = self.files[*file].len();
                let growth = (offset + bytes.len()).saturating_sub(length);
                let free = self
                    .room
                    .map_or(usize::MAX, |room| room.saturating_sub(self.used()) as usize);
                let missing = growth.saturating_sub(free);
                let fits = bytes.len().saturating_sub(missing);
                let end = offset + fits;
                if fits > 0 {
                    if end > length {
                        self.files[*file].resize(end, 0);
                    }
                    self.files[*file][offset..end].copy_from_slice(&bytes[..fits]);
                }
                if missing > 0 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
            }
            Change::SetLen { file, length } => {
                self.files[*file].resize(usize::try_from(*length).unwrap(), 0)
            }
            Change::Punch { file, range } => {
                let file = &mut self.files[*file];
                let end = file.len().min(range.end as usize);
                if (range.start as usize) < end {
                    file[range.start as usize..end].fill(0);
                }
            }
            Change::Sync { .. } => {}
        }
        Ok(())
    }

    fn change(&mut self, mut change: Change) -> io::Result<()> {
        let free = self.room.map(|room| room.saturating_sub(self.used()));
        let outcome = self.apply(&change);
        if let (
            Err(_),
            Change::Write {
                file,
                offset,
                bytes,
            },
            Some(free),
        ) = (&outcome, &mut change, free)
        {
            // What is written down is what happened.
            let end = self.files[*file].len() as u64;
            let fits = if free == 0 && end <= *offset {
                0
            } else {
                end.saturating_sub(*offset)
            };
            bytes.truncate(fits as usize);
        }
        self.journal.push(change);
        outcome
    }
}

impl ReadAt for DiskFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let content = self.disk.0.lock().unwrap();
        let file = &content.files[self.number];
        let start = usize::try_from(offset).unwrap();
        let source = file
            .get(start..start + buffer.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(source);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.0.lock().unwrap().files[self.number].len() as u64)
    }

    fn try_read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        self.read_exact_at(buffer, offset).map(|()| true)
    }
}

impl WriteAt for DiskFile {
    fn write_all_at(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        let change = Change::Write {
            file: self.number,
            offset,
            bytes: buffer.to_vec(),
        };
        self.disk.0.lock().unwrap().change(change)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.disk.0.lock().unwrap().change(Change::SetLen {
            file: self.number,
            length,
        })
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut content = self.disk.0.lock().unwrap();
        match &mut content.syncs {
            Some(0) => return Err(io::Error::other("the disk is broken")),
            Some(left) => *left -= 1,
            None => {}
        }
        content.change(Change::Sync { file: self.number })
    }

    fn punch_hole(&self, range: Range<u64>) -> io::Result<()> {
        self.disk.0.lock().unwrap().change(Change::Punch {
            file: self.number,
            range,
        })
    }

    fn data_extents(&self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let content = self.disk.0.lock().unwrap();
        let file = &content.files[self.number];
        let mut extents: Vec<Range<u64>> = Vec::new();
        for (number, block) in file.chunks(4096).enumerate() {
            let start = (number as u64 * 4096).max(range.start);
            let end = (number as u64 * 4096 + block.len() as u64).min(range.end);
            if start >= end || block.iter().all(|byte| *byte == 0) {
                continue;
            }
            match extents.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => extents.push(start..end),
            }
        }
        Ok(extents)
    }
}

/// Bytes as a source.
pub struct Bytes(pub Vec<u8>);

impl ReadAt for Bytes {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let end = start
            .checked_add(buffer.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(self.0.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }
}

pub fn layer(bytes: &[u8]) -> overlaybd::Result<Layer> {
    Layer::open(Arc::new(Bytes(bytes.to_vec())))
}

/// A stack of layers without upper.
pub fn stack_of(layers: &[Vec<u8>]) -> Stack {
    let layers = layers
        .iter()
        .map(|bytes| Arc::new(layer(bytes).unwrap()))
        .collect();
    Stack::open(Lowers::merge(layers).unwrap(), None).unwrap()
}

pub fn options(mode: Mode, virtual_size: u64) -> UpperOptions {
    UpperOptions {
        mode,
        virtual_size,
        uuid: None,
        parent_uuid: None,
        user_tag: Vec::new(),
    }
}

/// A new upper; its files are the next two (sparse: one) of the disk.
pub fn upper(disk: &Disk, mode: Mode, virtual_size: u64) -> Upper {
    upper_with(disk, options(mode, virtual_size))
}

pub fn upper_with(disk: &Disk, options: UpperOptions) -> Upper {
    let data = disk.file();
    let index = (options.mode != Mode::Sparse).then(|| disk.file() as Box<dyn WriteAt>);
    Upper::create(data, index, options).unwrap()
}

/// The upper whose data file is number `data`, opened again.
pub fn reopen(disk: &Disk, mode: Mode, data: usize) -> overlaybd::Result<Upper> {
    let index = (mode != Mode::Sparse).then(|| disk.reopen(data + 1) as Box<dyn WriteAt>);
    Upper::open(disk.reopen(data), index)
}

/// A stack of an upper alone.
pub fn alone(upper: Upper) -> Stack {
    Stack::open(Lowers::merge(Vec::new()).unwrap(), Some(upper)).unwrap()
}

pub fn read_all(stack: &Stack) -> Vec<u8> {
    let mut bytes = vec![0xEE; usize::try_from(stack.virtual_size()).unwrap()];
    stack.read_at(&mut bytes, 0).unwrap();
    bytes
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

pub fn nil() -> Option<Uuid> {
    Some(Uuid::nil())
}

/// Numbers that are the same in each run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}
