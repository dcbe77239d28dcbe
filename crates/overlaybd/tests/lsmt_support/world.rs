//! A device beside a plain byte array that says what it must read like: every operation goes to both.

use std::sync::Arc;

use overlaybd::commit::{self, CommitOptions};
use overlaybd::layer::Layer;
use overlaybd::stack::{ExtentKind, Lowers, Stack};
use overlaybd::upper::{Mode, Upper};
use overlaybd::Uuid;

use super::{layer, read_all, reopen, upper, Bytes, Change, Disk, Random, SECTOR};

const MAX_SECTORS: u64 = 1024;

/// What can be done to a device. Numbers are taken modulo what there is.
#[derive(Debug, Clone)]
pub enum Op {
    Write {
        at: u64,
        length: u64,
        fill: u8,
    },
    Discard {
        at: u64,
        length: u64,
    },
    Flush,
    Restack {
        mode: u8,
    },
    /// Replace neighbouring lowers by their merge.
    Merge {
        first: u64,
        count: u64,
    },
    Reopen,
    Resize {
        by: u64,
    },
    /// Write while the disk has only so much room.
    WriteOnFullDisk {
        at: u64,
        length: u64,
        fill: u8,
        free: u64,
    },
    RestackOnFullDisk {
        free: u64,
    },
    /// Stop after some of the changes since the last flush, the last one perhaps torn, and open what is left.
    Crash {
        at: u64,
        torn: bool,
    },
}

/// The files of one upper on the disk, which may be sealed by now.
#[derive(Clone, Copy)]
pub struct UpperFiles {
    pub mode: Mode,
    pub data: usize,
}

/// Where a lower comes from: a sealed upper on the disk, or a merge.
#[derive(Clone)]
enum Origin {
    Sealed(usize),
    Merged(Vec<u8>),
}

pub struct World {
    pub disk: Disk,
    pub stack: Stack,
    pub model: Vec<u8>,
    lowers: Vec<Origin>,
    pub live: UpperFiles,
    /// Files as they were when the journal began, and the model at each of its moments since the last flush.
    base: Vec<Vec<u8>>,
    history: Vec<(usize, Vec<u8>)>,
    modes: Vec<Mode>,
    crashes: bool,
}

impl World {
    /// The first of `modes` is that of the first upper; restacks use any.
    pub fn new(modes: &[Mode], sectors: u64, crashes: bool) -> Self {
        let disk = Disk::default();
        let size = sectors * SECTOR as u64;
        let upper = upper(&disk, modes[0], size);
        let stack = super::alone(upper);
        let mut world = Self {
            disk,
            stack,
            model: vec![0; size as usize],
            lowers: Vec::new(),
            live: UpperFiles {
                mode: modes[0],
                data: 0,
            },
            base: Vec::new(),
            history: Vec::new(),
            modes: modes.to_vec(),
            crashes,
        };
        world.stack.flush().unwrap();
        world.begin_history();
        world
    }

    pub fn random_op(random: &mut Random) -> Op {
        let at = random.next();
        let length = if random.chance(4) {
            random.below(200)
        } else {
            random.below(20)
        };
        let fill = if random.chance(6) {
            0
        } else {
            1 + random.below(255) as u8
        };
        match random.below(40) {
            0..16 => Op::Write { at, length, fill },
            16..23 => Op::Discard { at, length },
            23..26 => Op::Flush,
            26..28 => Op::Restack {
                mode: random.below(3) as u8,
            },
            28..30 => Op::Merge {
                first: random.next(),
                count: random.next(),
            },
            30..32 => Op::Reopen,
            32 => Op::Resize {
                by: random.below(64),
            },
            33..35 => Op::WriteOnFullDisk {
                at,
                length,
                fill,
                free: random.below(30_000),
            },
            35 => Op::RestackOnFullDisk {
                free: random.below(9_000),
            },
            _ => Op::Crash {
                at: random.next(),
                torn: random.chance(2),
            },
        }
    }

    pub fn apply(&mut self, op: &Op) {
        match *op {
            Op::Write { at, length, fill } => {
                let (offset, data) = self.data(at, length, fill);
                self.stack.write_at(&data, offset as u64).unwrap();
                self.model[offset..offset + data.len()].copy_from_slice(&data);
            }
            Op::Discard { at, length } => {
                let (offset, length) = self.range(at, length);
                self.stack.discard(offset as u64, length as u64).unwrap();
                self.model[offset..offset + length].fill(0);
            }
            Op::Flush => self.flush(),
            Op::Restack { mode } => self.restack(mode),
            Op::Merge { first, count } => self.merge(first, count),
            Op::Reopen => self.reopen(),
            Op::Resize { by } => {
                let sectors = self.sectors() + by;
                if sectors <= MAX_SECTORS {
                    let size = sectors * SECTOR as u64;
                    self.stack.resize(size).unwrap();
                    self.model.resize(size as usize, 0);
                    self.begin_history();
                }
            }
            Op::WriteOnFullDisk {
                at,
                length,
                fill,
                free,
            } => self.write_on_full_disk(at, length, fill, free),
            Op::RestackOnFullDisk { free } => self.restack_on_full_disk(free),
            Op::Crash { at, torn } => {
                if self.crashes {
                    self.crash(at, torn);
                }
            }
        }
        self.history.push((self.disk.changes(), self.model.clone()));
        self.verify();
    }

    fn sectors(&self) -> u64 {
        (self.model.len() / SECTOR) as u64
    }

    fn range(&self, at: u64, length: u64) -> (usize, usize) {
        let start = at % self.sectors();
        let length = length.min(self.sectors() - start);
        (start as usize * SECTOR, length as usize * SECTOR)
    }

    /// Each sector has bytes of its own, so that one in a wrong place is seen.
    fn data(&self, at: u64, length: u64, fill: u8) -> (usize, Vec<u8>) {
        let (offset, length) = self.range(at, length);
        let mut data = vec![fill; length];
        if fill != 0 {
            for (number, sector) in data.chunks_mut(SECTOR).enumerate() {
                sector[..8].copy_from_slice(&((offset / SECTOR + number) as u64).to_le_bytes());
            }
        }
        (offset, data)
    }

    fn flush(&mut self) {
        self.stack.flush().unwrap();
        self.begin_history();
    }

    /// From here on a crash may fall back to this moment at most.
    fn begin_history(&mut self) {
        self.history = vec![(self.disk.changes(), self.model.clone())];
    }

    fn fresh(&self, mode: u8) -> (Upper, UpperFiles) {
        let mode = self.modes[usize::from(mode) % self.modes.len()];
        let data = self.disk.contents().len();
        (upper(&self.disk, mode, 0), UpperFiles { mode, data })
    }

    fn restack(&mut self, mode: u8) {
        let (upper, files) = self.fresh(mode);
        let parent = self
            .stack
            .lowers()
            .layers()
            .last()
            .map(|layer| layer.uuid());
        let restacked = self.stack.restack(upper).unwrap();
        assert_eq!(restacked.layer.parent_uuid(), parent);
        assert_ne!(restacked.layer.uuid(), Uuid::nil());
        let file = self.disk.bytes(self.live.data);
        assert!(Upper::is_sealed(&Bytes(file.clone())).unwrap());
        let opened = layer(&file).unwrap();
        assert!(
            opened.index().iter().eq(restacked.layer.index().iter()),
            "memory and file agree"
        );
        self.lowers.push(Origin::Sealed(self.live.data));
        self.live = files;
        self.begin_history();
    }

    fn merge(&mut self, first: u64, count: u64) {
        if self.lowers.is_empty() {
            return;
        }
        let first = first as usize % self.lowers.len();
        let count = 1 + count as usize % (self.lowers.len() - first);
        let merged = merged(
            &self.stack.lowers().layers()[first..first + count],
            first > 0,
        );
        self.stack
            .replace_lowers(first, count, Arc::new(layer(&merged).unwrap()))
            .unwrap();
        self.lowers
            .splice(first..first + count, [Origin::Merged(merged)]);
    }

    fn open_lowers(&self, disk: &Disk) -> Arc<Lowers> {
        let layers = self.lowers.iter().map(|origin| {
            Arc::new(match origin {
                Origin::Sealed(file) => layer(&disk.bytes(*file)).unwrap(),
                Origin::Merged(bytes) => layer(bytes).unwrap(),
            })
        });
        Lowers::merge(layers.collect()).unwrap()
    }

    fn reopen(&mut self) {
        if self.live.mode == Mode::Sparse && !self.lowers.is_empty() {
            let upper = reopen(&self.disk, Mode::Sparse, self.live.data).unwrap();
            assert!(Stack::open(self.open_lowers(&self.disk), Some(upper)).is_err());
            return;
        }
        let upper = reopen(&self.disk, self.live.mode, self.live.data).unwrap();
        self.stack = Stack::open(self.open_lowers(&self.disk), Some(upper)).unwrap();
        self.stack.lowers().verify_parents().unwrap();
    }

    fn write_on_full_disk(&mut self, at: u64, length: u64, fill: u8, free: u64) {
        let (offset, data) = self.data(at, length, fill);
        self.disk.set_free(Some(free));
        let written = self.stack.write_at(&data, offset as u64);
        self.disk.set_free(None);
        if let Err(error) = &written {
            assert!(error.is_out_of_space(), "{error}");
        }
        // What failed may be there in part, by sectors.
        let mut found = vec![0; data.len()];
        self.stack.read_at(&mut found, offset as u64).unwrap();
        let old = self.model[offset..offset + data.len()].to_vec();
        assert!(written.is_err() || found == data);
        assert_sectors(&found, &[&old, &data], "a write on a full disk");
        self.model[offset..offset + data.len()].copy_from_slice(&found);
        // The failed write may come back after a crash, so nothing before this moment is told apart from it.
        self.flush();
    }

    fn restack_on_full_disk(&mut self, free: u64) {
        let (upper, files) = self.fresh(0);
        self.disk.set_free(Some(free));
        let restacked = self.stack.restack(upper);
        self.disk.set_free(None);
        match restacked {
            Ok(_) => {
                self.lowers.push(Origin::Sealed(self.live.data));
                self.live = files;
            }
            Err(error) => assert!(error.is_out_of_space(), "{error}"),
        }
        self.flush();
    }

    fn crash(&mut self, at: u64, torn: bool) {
        if self.live.mode == Mode::Sparse && !self.lowers.is_empty() {
            return;
        }
        let journal = self.disk.journal();
        let from = self.history[0].0;
        let kept = from + (at as usize) % (journal.len() - from + 1);
        let mut changes = journal[..kept].to_vec();
        if torn && kept > from {
            tear(&mut changes, at / 7);
        }
        self.base.resize(self.disk.contents().len(), Vec::new());
        self.disk = Disk::after(self.base.clone(), &changes);
        self.base = self.disk.contents();
        let upper = reopen(&self.disk, self.live.mode, self.live.data).unwrap();
        self.stack = Stack::open(self.open_lowers(&self.disk), Some(upper)).unwrap();
        let found = read_all(&self.stack);
        let done = self
            .history
            .iter()
            .rposition(|(end, _)| *end <= kept - usize::from(torn && kept > from))
            .unwrap();
        let before = &self.history[done].1;
        let after = self
            .history
            .get(done + 1)
            .map_or(before, |(_, model)| model);
        assert_sectors(&found, &[before, after], "a crash");
        self.model = found;
        self.history.clear();
        self.flush();
    }

    pub fn verify(&self) {
        assert_eq!(self.stack.virtual_size(), self.model.len() as u64);
        assert!(
            read_all(&self.stack) == self.model,
            "the device differs from the model"
        );
        let mut position = 0;
        let mut last = None;
        for extent in self.stack.extents(0..self.model.len() as u64).unwrap() {
            assert_eq!(extent.offset, position);
            assert!(extent.length > 0 && last != Some(extent.kind));
            position += extent.length;
            last = Some(extent.kind);
            if extent.kind != ExtentKind::Data {
                let range = extent.offset as usize..position as usize;
                assert!(self.model[range].iter().all(|byte| *byte == 0));
            }
        }
        assert_eq!(position, self.model.len() as u64);
    }

    /// What is made of the device reads like it.
    pub fn verify_commits(&self) {
        let mut flat = Vec::new();
        commit::flatten(&self.stack, &mut flat, CommitOptions::default()).unwrap();
        assert!(read_all(&super::stack_of(&[flat.clone()])) == self.model);
        let again = merged(&[Arc::new(layer(&flat).unwrap())], false);
        let (first, second) = (layer(&flat).unwrap(), layer(&again).unwrap());
        assert!(
            first.index().iter().eq(second.index().iter()),
            "a commit of a commit has the same records"
        );
    }
}

/// Neighbouring layers as one.
pub fn merged(layers: &[Arc<Layer>], keep_zeroes: bool) -> Vec<u8> {
    let mut output = Vec::new();
    let options = CommitOptions {
        // In the place of the topmost: what was made on top of that still names its parent.
        uuid: layers.last().map(|layer| layer.uuid()),
        parent_uuid: layers[0].parent_uuid(),
        keep_zeroes,
        ..CommitOptions::default()
    };
    commit::merge(
        &Lowers::merge(layers.to_vec()).unwrap(),
        &mut output,
        options,
    )
    .unwrap();
    output
}

/// Make the last change one of which only a part happened.
pub fn tear(changes: &mut Vec<Change>, at: u64) {
    match changes.last_mut() {
        Some(Change::Write { bytes, .. }) => {
            let kept = at as usize % (bytes.len() + 1);
            bytes.truncate(kept);
        }
        Some(_) => {
            changes.pop();
        }
        None => {}
    }
}

/// Each sector is that of one of the states. A sector torn by a crash in the middle is taken as that of the last state.
pub fn assert_sectors(found: &[u8], states: &[&Vec<u8>], what: &str) {
    assert_eq!(found.len(), states[0].len());
    for (number, sector) in found.chunks(SECTOR).enumerate() {
        let range = number * SECTOR..number * SECTOR + sector.len();
        let known = states.iter().any(|state| state[range.clone()] == *sector);
        assert!(
            known || torn(sector, states, range),
            "sector {number} has bytes from elsewhere after {what}"
        );
    }
}

/// A write in place that was cut within the sector.
fn torn(sector: &[u8], states: &[&Vec<u8>], range: std::ops::Range<usize>) -> bool {
    let [old, new] = states else { return false };
    let (old, new) = (&old[range.clone()], &new[range]);
    (0..sector.len()).any(|cut| sector[..cut] == new[..cut] && sector[cut..] == old[cut..])
}
