//! A device under many threads, on real files: every thread verifies its own sectors while the device is restacked, merged,
//! grown and flushed; and shared sectors only ever hold what someone wrote.

mod lsmt_support;

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;

use lsmt_support::world::merged;
use lsmt_support::{options, Random};
use overlaybd::io::WriteAt;
use overlaybd::layer::Layer;
use overlaybd::stack::{Lowers, Stack};
use overlaybd::upper::{Mode, Upper};

const THREADS: u64 = 6;
/// Sectors of one thread; thread n has sector n, n + THREADS, and so on, so that requests interleave in every way.
const OWN: u64 = 400;
const SHARED: u64 = 64;
const SIZE: u64 = (THREADS * OWN + SHARED) * 512;

fn create(directory: &Path, number: usize, mode: Mode) -> Upper {
    let file = |kind: &str| {
        let path = directory.join(format!("{number}.{kind}"));
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .unwrap()
    };
    let index = (mode != Mode::Sparse).then(|| Box::new(file("index")) as Box<dyn WriteAt>);
    Upper::create(Box::new(file("data")), index, options(mode, SIZE)).unwrap()
}

fn content(sector: u64, version: u64) -> [u8; 512] {
    let mut bytes = [version as u8; 512];
    if version == 0 {
        return bytes;
    }
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..16].copy_from_slice(&version.to_le_bytes());
    bytes[496..504].copy_from_slice(&sector.to_le_bytes());
    bytes[504..].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Write, discard and read own sectors; they must always be what this thread wrote last.
fn own_sectors(stack: &Stack, thread: u64, rounds: u64) -> Vec<u64> {
    let mut random = Random(thread);
    let mut versions = vec![0; OWN as usize];
    for round in 1..=rounds {
        let slot = random.below(OWN);
        let sector = slot * THREADS + thread;
        if random.chance(5) {
            stack.discard(sector * 512, 512).unwrap();
            versions[slot as usize] = 0;
        } else {
            stack
                .write_at(&content(sector, round), sector * 512)
                .unwrap();
            versions[slot as usize] = round;
        }
        let slot = random.below(OWN);
        let sector = slot * THREADS + thread;
        // With neighbours of other threads, so that a read has many pieces.
        let before = random.below(sector.min(20) + 1);
        let mut bytes = vec![0xEE; (before as usize + 1) * 512];
        let offset = (sector - before) * 512;
        if !(random.chance(2) && stack.try_read_at(&mut bytes, offset).unwrap()) {
            stack.read_at(&mut bytes, offset).unwrap();
        }
        let found = &bytes[before as usize * 512..];
        assert!(
            found == content(sector, versions[slot as usize]),
            "thread {thread}, round {round}, sector {sector}"
        );
    }
    versions
}

/// All threads write whole shared sectors; each must be one that was written, never a mix or another's place.
fn shared_sectors(stack: &Stack, thread: u64, next_version: &AtomicU64, done: &AtomicBool) {
    let mut random = Random(1000 + thread);
    while !done.load(Ordering::Acquire) {
        let sector = THREADS * OWN + random.below(SHARED);
        if random.chance(2) {
            let version = next_version.fetch_add(1, Ordering::Relaxed);
            stack
                .write_at(&content(sector, version), sector * 512)
                .unwrap();
        } else if random.chance(4) {
            stack.discard(sector * 512, 512).unwrap();
        }
        let mut bytes = [0xEE; 512];
        stack.read_at(&mut bytes, sector * 512).unwrap();
        let version = u64::from_le_bytes(bytes[504..].try_into().unwrap());
        assert!(version < next_version.load(Ordering::Relaxed));
        // Files may tear what is read while it is overwritten in place, but never bring bytes from elsewhere.
        let place = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(
            place == sector || place == 0,
            "sector {sector} has the bytes of {place}"
        );
    }
}

/// Ends the threads that run until the others are done, also when an assertion fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn stress(modes: &[Mode], rounds: u64) {
    let directory = tempfile::tempdir().unwrap();
    let stack = Stack::open(
        Lowers::merge(Vec::new()).unwrap(),
        Some(create(directory.path(), 0, modes[0])),
    )
    .unwrap();
    let done = AtomicBool::new(false);
    let next_version = AtomicU64::new(1);
    let versions: Vec<Vec<u64>> = thread::scope(|scope| {
        let stack = &stack;
        let end = EndOnDrop(&done);
        let owners: Vec<_> = (0..THREADS)
            .map(|number| scope.spawn(move || own_sectors(stack, number, rounds)))
            .collect();
        for number in 0..2 {
            let (next_version, done) = (&next_version, &done);
            scope.spawn(move || shared_sectors(stack, number, next_version, done));
        }
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                stack.flush().unwrap();
                stack.extents(0..SIZE).unwrap();
                let _ = stack.statistics();
            }
        });
        let mut number = 0;
        while owners.iter().any(|owner| !owner.is_finished()) {
            number += 1;
            let mode = modes[number % modes.len()];
            stack
                .restack(create(directory.path(), number, mode))
                .unwrap();
            let lowers = stack.lowers();
            if lowers.layers().len() > 4 {
                let first = number % 2;
                let merged = merged(&lowers.layers()[first..first + 3], first > 0);
                let path = directory.path().join(format!("{number}.merged"));
                std::fs::write(&path, merged).unwrap();
                let layer = Layer::open(Arc::new(File::open(path).unwrap())).unwrap();
                stack.replace_lowers(first, 3, Arc::new(layer)).unwrap();
            }
        }
        drop(end);
        assert!(number > 3, "restacked {number} times only");
        owners
            .into_iter()
            .map(|owner| owner.join().unwrap())
            .collect()
    });
    let mut bytes = [0; 512];
    let mut check = |stack: &Stack| {
        for (thread, versions) in versions.iter().enumerate() {
            for (slot, version) in versions.iter().enumerate() {
                let sector = slot as u64 * THREADS + thread as u64;
                stack.read_at(&mut bytes, sector * 512).unwrap();
                assert!(
                    bytes == content(sector, *version),
                    "sector {sector} at the end"
                );
            }
        }
    };
    check(&stack);
    stack.seal().unwrap();
    check(&stack);
}

#[test]
fn hybrid() {
    stress(&[Mode::Hybrid], 4000);
}

#[test]
fn append() {
    stress(&[Mode::Append], 4000);
}

#[test]
fn every_mode() {
    stress(&[Mode::Append, Mode::Sparse, Mode::Hybrid], 4000);
}
