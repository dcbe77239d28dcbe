//! What the hostile tests share: layers built from the format's description alone, a reader that is simple enough to be
//! believed, an allocator that counts, and a source that gives up on whoever reads it without end. No expectations.
#![allow(dead_code)] // Each test binary uses another part.

pub mod allocations;
pub mod corpus;
pub mod layers;
pub mod mutation;

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use overlaybd::io::ReadAt;
use overlaybd::probe::{open_layer, Wrapper};
use overlaybd::stack::{Lowers, Stack};

/// Most memory that opening and reading a small file may take, in bytes.
pub const MEMORY_CAP: usize = 64 << 20;
/// Most reads of the source that opening and reading a small file may take.
const READ_CAP: usize = 200_000;
const SECTOR: u64 = 512;

/// A file in memory that panics when it is read so often that the reader must be in a loop.
pub struct Budgeted {
    bytes: Vec<u8>,
    reads: AtomicUsize,
}

impl Budgeted {
    pub fn shared(bytes: &[u8]) -> Arc<Self> {
        Arc::new(Self {
            bytes: bytes.to_vec(),
            reads: AtomicUsize::new(0),
        })
    }
}

impl ReadAt for Budgeted {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let reads = self.reads.fetch_add(1, Ordering::Relaxed);
        assert!(
            reads < READ_CAP,
            "{reads} reads of a file of {} bytes",
            self.bytes.len()
        );
        let part = usize::try_from(offset)
            .ok()
            .and_then(|start| self.bytes.get(start..start.checked_add(buffer.len())?))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(part);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.len() as u64)
    }
}

/// What a layer showed: its size, its wrappers, and what was read at some places of the device.
pub struct View {
    pub virtual_size: u64,
    pub wrappers: Vec<Wrapper>,
    pub reads: Vec<(u64, Vec<u8>)>,
}

impl View {
    /// Whether all that was read is what `model` has there.
    pub fn agrees_with(&self, model: &[u8]) -> bool {
        self.virtual_size == model.len() as u64
            && self.reads.iter().all(|(offset, bytes)| {
                let start = *offset as usize;
                model.get(start..start + bytes.len()) == Some(bytes)
            })
    }
}

/// Open a file and read it: all of a small device, the surroundings of its records of a large one.
///
/// Panics if that takes more memory or more reads than a small file may.
pub fn explore(bytes: &[u8]) -> overlaybd::Result<View> {
    let source = Budgeted::shared(bytes);
    let (result, peak) = allocations::peak(|| view(source));
    assert!(
        peak <= MEMORY_CAP,
        "{peak} bytes of memory for a file of {} bytes",
        bytes.len()
    );
    result
}

fn view(source: Arc<dyn ReadAt>) -> overlaybd::Result<View> {
    let opened = open_layer(source)?;
    let layer = Arc::new(opened.layer);
    let records: Vec<_> = layer.index().iter().take(64).collect();
    let stack = Stack::open(Lowers::merge(vec![layer])?, None)?;
    let virtual_size = stack.virtual_size();
    let sectors = virtual_size / SECTOR;
    let mut reads = Vec::new();
    let mut read = |sector: u64, count: u64| -> overlaybd::Result<()> {
        let start = sector.min(sectors);
        let mut buffer = vec![0xEE; (count.min(sectors - start) * SECTOR) as usize];
        if !buffer.is_empty() {
            stack.read_at(&mut buffer, start * SECTOR)?;
        }
        reads.push((start * SECTOR, buffer));
        Ok(())
    };
    if sectors <= 256 {
        read(0, sectors)?;
    }
    read(0, 8)?;
    read(sectors.saturating_sub(8), 8)?;
    for record in records {
        read(record.lba.saturating_sub(2), 8)?;
        read(record.end().saturating_sub(2), 8)?;
    }
    Ok(View {
        virtual_size,
        wrappers: opened.wrappers,
        reads,
    })
}
