//! Crashes at every moment of a sequence of operations: what is found again is a state that there was, and never one from
//! before the last flush. Crashes of the process keep every write; those of the host lose some of what was not synced.

mod lsmt_support;

use std::ops::Range;
use std::sync::Arc;

use lsmt_support::world::{assert_sectors, tear};
use lsmt_support::*;
use overlaybd::stack::{Lowers, Stack};
use overlaybd::upper::{Mode, Upper};
use overlaybd::Error;

const SECTORS: u64 = 96;
const SIZE: usize = SECTORS as usize * SECTOR;

/// What happened, and what the device read like after each operation.
struct Story {
    disk: Disk,
    base: Vec<u8>,
    /// Length of the journal after each operation, and the content.
    states: Vec<(usize, Vec<u8>)>,
    /// Lengths of the journal at which a flush or restack had returned.
    durable: Vec<usize>,
}

fn base_layer() -> Vec<u8> {
    let mut output = Vec::new();
    let options = overlaybd::commit::CommitOptions {
        virtual_size: Some(SIZE as u64),
        ..Default::default()
    };
    let mut writer = overlaybd::commit::LayerWriter::new(&mut output, options).unwrap();
    writer.write(8 * 512, &[0xBA; 40 * 512]).unwrap();
    writer.finish().unwrap();
    output
}

fn lowers(files: Vec<Vec<u8>>) -> Arc<Lowers> {
    Lowers::merge(
        files
            .iter()
            .map(|file| Arc::new(layer(file).unwrap()))
            .collect(),
    )
    .unwrap()
}

fn tell(mode: Mode, seed: u64, operations: usize, restacks: bool) -> Story {
    let base = base_layer();
    let disk = Disk::default();
    let stack = Stack::open(
        lowers(vec![base.clone()]),
        Some(upper(&disk, mode, SIZE as u64)),
    )
    .unwrap();
    stack.flush().unwrap();
    let mut model = read_all(&stack);
    let mut story = Story {
        disk,
        base,
        states: Vec::new(),
        durable: Vec::new(),
    };
    let mut random = Random(seed);
    for number in 0..=operations {
        let at = random.below(SECTORS);
        let length = (1 + random.below(12)).min(SECTORS - at);
        let range = at as usize * SECTOR..(at + length) as usize * SECTOR;
        match random.below(12) {
            _ if number == 0 => story.durable.push(story.disk.changes()),
            0..8 => {
                let data: Vec<u8> = (0..range.len())
                    .map(|byte| (number * 7 + byte / SECTOR) as u8 | 1)
                    .collect();
                stack.write_at(&data, range.start as u64).unwrap();
                model[range].copy_from_slice(&data);
            }
            8..10 => {
                stack
                    .discard(range.start as u64, range.len() as u64)
                    .unwrap();
                model[range].fill(0);
            }
            10 if restacks => {
                stack.restack(upper(&story.disk, mode, 0)).unwrap();
                story.durable.push(story.disk.changes());
            }
            _ => {
                stack.flush().unwrap();
                story.durable.push(story.disk.changes());
            }
        }
        assert!(read_all(&stack) == model);
        story.states.push((story.disk.changes(), model.clone()));
    }
    story
}

/// Do what the owner of the files does at its next start: sealed uppers are layers, the first that is not is the upper.
fn recover(disk: &Disk, base: &[u8], mode: Mode) -> Stack {
    let files = disk.contents();
    let per_upper = if mode == Mode::Sparse { 1 } else { 2 };
    let mut layers = vec![base.to_vec()];
    let mut data = 0;
    while Upper::is_sealed(&Bytes(files[data].clone())).unwrap() {
        layers.push(files[data].clone());
        data += per_upper;
    }
    let upper = reopen(disk, mode, data).unwrap();
    Stack::open(lowers(layers), Some(upper)).unwrap()
}

fn every_prefix(mode: Mode, restacks: bool, seeds: Range<u64>) {
    for seed in seeds {
        let story = tell(mode, seed, 50, restacks);
        let journal = story.disk.journal();
        let files = story.disk.contents().len();
        let first = story.states[0].0;
        for cut in first..=journal.len() {
            for torn in [false, true] {
                let mut changes = journal[..cut].to_vec();
                if torn {
                    if cut == first {
                        continue;
                    }
                    tear(&mut changes, cut as u64 * 5 + seed);
                }
                let disk = Disk::after(vec![Vec::new(); files], &changes);
                let stack = recover(&disk, &story.base, mode);
                let found = read_all(&stack);
                let complete = cut - usize::from(torn);
                let done = story
                    .states
                    .iter()
                    .rposition(|(end, _)| *end <= complete)
                    .unwrap();
                let before = &story.states[done].1;
                let after = story
                    .states
                    .get(done + 1)
                    .map_or(before, |(_, model)| model);
                assert_sectors(
                    &found,
                    &[before, after],
                    &format!("seed {seed}, {cut} changes, torn: {torn}"),
                );
                still_works(stack, &disk, &story.base, mode, found);
            }
        }
    }
}

/// What was recovered can be written, and recovered again.
fn still_works(stack: Stack, disk: &Disk, base: &[u8], mode: Mode, mut model: Vec<u8>) {
    for (at, fill) in [(3, 0xC1), (40, 0xC2), (3, 0xC3)] {
        stack
            .write_at(&[fill; 9 * SECTOR], at * SECTOR as u64)
            .unwrap();
        model[at as usize * SECTOR..(at as usize + 9) * SECTOR].fill(fill);
    }
    assert!(read_all(&stack) == model);
    drop(stack);
    assert!(read_all(&recover(disk, base, mode)) == model);
}

#[test]
fn append_at_every_moment() {
    every_prefix(Mode::Append, false, 0..4);
}

#[test]
fn append_with_restacks_at_every_moment() {
    every_prefix(Mode::Append, true, 10..14);
}

#[test]
fn hybrid_at_every_moment() {
    every_prefix(Mode::Hybrid, false, 20..24);
}

#[test]
fn hybrid_with_restacks_at_every_moment() {
    every_prefix(Mode::Hybrid, true, 30..34);
}

/// Cut the changes that were not synced: a file that grew keeps any length, writes within it happened or not.
fn lose(journal: &[Change], synced: usize, files: usize, random: &mut Random) -> Disk {
    let disk = Disk::after(vec![Vec::new(); files], &journal[..synced]);
    let mut contents = disk.contents();
    let durable: Vec<usize> = contents.iter().map(Vec::len).collect();
    let grown: Vec<usize> = Disk::after(contents.clone(), &journal[synced..])
        .contents()
        .iter()
        .map(Vec::len)
        .collect();
    let kept: Vec<usize> = durable
        .iter()
        .zip(&grown)
        .map(|(&from, &to)| {
            if to > from {
                from + random.below((to - from) as u64 + 1) as usize
            } else {
                to
            }
        })
        .collect();
    for change in &journal[synced..] {
        match change {
            Change::Write {
                file,
                offset,
                bytes,
            } => {
                let start = *offset as usize;
                let end = start + bytes.len();
                if start < durable[*file] && random.chance(2) {
                    continue;
                }
                if contents[*file].len() < end {
                    contents[*file].resize(end, 0);
                }
                contents[*file][start..end].copy_from_slice(bytes);
            }
            Change::Punch { file, range } if random.chance(2) => {
                let end = contents[*file].len().min(range.end as usize);
                contents[*file][(range.start as usize).min(end)..end].fill(0);
            }
            _ => {}
        }
    }
    for (file, length) in contents.iter_mut().zip(kept) {
        file.truncate(length);
    }
    Disk::after(contents, &[])
}

#[test]
fn a_log_survives_a_crash_of_the_host_as_one_of_its_states() {
    let mut random = Random(77);
    for seed in 0..6 {
        let story = tell(Mode::Append, 100 + seed, 60, false);
        let journal = story.disk.journal();
        for _ in 0..150 {
            let crash = random.below(journal.len() as u64 + 1) as usize;
            let Some(&synced) = story.durable.iter().rfind(|end| **end <= crash) else {
                continue;
            };
            let disk = lose(&journal[..crash], synced, 2, &mut random);
            let found = read_all(&recover(&disk, &story.base, Mode::Append));
            let flushed = story
                .states
                .iter()
                .rposition(|(end, _)| *end <= synced)
                .unwrap();
            let later = &story.states[flushed..];
            let one_of = later.iter().any(|(_, state)| *state == found)
                || later
                    .windows(2)
                    .any(|pair| is_mixed(&found, &[&pair[0].1, &pair[1].1]));
            assert!(
                one_of,
                "seed {seed}, crash after {crash} changes, synced {synced}"
            );
        }
    }
}

#[test]
fn a_hybrid_upper_survives_a_crash_of_the_host_with_old_or_new_sectors() {
    let mut random = Random(78);
    for seed in 0..6 {
        let story = tell(Mode::Hybrid, 200 + seed, 60, false);
        let journal = story.disk.journal();
        for _ in 0..150 {
            let crash = random.below(journal.len() as u64 + 1) as usize;
            let Some(&synced) = story.durable.iter().rfind(|end| **end <= crash) else {
                continue;
            };
            let disk = lose(&journal[..crash], synced, 2, &mut random);
            let found = read_all(&recover(&disk, &story.base, Mode::Hybrid));
            let flushed = story
                .states
                .iter()
                .rposition(|(end, _)| *end <= synced)
                .unwrap();
            let states: Vec<&Vec<u8>> = story.states[flushed..]
                .iter()
                .map(|(_, state)| state)
                .collect();
            assert!(
                is_mixed(&found, &states),
                "seed {seed}, crash after {crash} changes, synced {synced}"
            );
        }
    }
}

fn is_mixed(found: &[u8], states: &[&Vec<u8>]) -> bool {
    found.chunks(SECTOR).enumerate().all(|(number, sector)| {
        let range = number * SECTOR..(number + 1) * SECTOR;
        states.iter().any(|state| state[range.clone()] == *sector)
    })
}

#[test]
fn a_record_whose_data_is_missing_ends_the_log_for_good() {
    let disk = Disk::default();
    let stack = alone(upper(&disk, Mode::Append, SIZE as u64));
    stack.write_at(&[1; 4096], 0).unwrap();
    stack.write_at(&[2; 4096], 4096).unwrap();
    stack.write_at(&[3; 4096], 0).unwrap();
    let mut files = disk.contents();
    // The third write's data, and a part of the second's, did not reach the disk; a torn record came after them.
    files[0].truncate(4096 + 4096 + 1000);
    files[1].extend_from_slice(&[9; 7]);
    let disk = Disk::after(files, &[]);
    let stack = alone(reopen(&disk, Mode::Append, 0).unwrap());
    assert_eq!(
        disk.bytes(1).len(),
        4096 + 16,
        "the records that follow are cut off"
    );
    assert_eq!(disk.bytes(0).len() % SECTOR, 0);
    assert!(disk
        .journal()
        .iter()
        .any(|change| matches!(change, Change::Sync { file: 1 })));
    let found = read_all(&stack);
    assert_eq!(found[..4096], [1; 4096]);
    assert!(found[4096..].iter().all(|byte| *byte == 0));
    // New data now fills the places that the lost records spoke of.
    stack.write_at(&[5; 8192], 20480).unwrap();
    let mut expected = found;
    expected[20480..28672].fill(5);
    drop(stack);
    assert!(read_all(&alone(reopen(&disk, Mode::Append, 0).unwrap())) == expected);
}

#[test]
fn padding_between_records_is_skipped() {
    let disk = Disk::default();
    let stack = alone(upper(&disk, Mode::Append, SIZE as u64));
    stack.write_at(&[1; 512], 0).unwrap();
    stack.write_at(&[2; 512], 512).unwrap();
    let expected = read_all(&stack);
    let mut files = disk.contents();
    let second = files[1].split_off(4096 + 16);
    files[1].extend_from_slice(&overlaybd::record::PADDING.repeat(70_000));
    files[1].extend_from_slice(&[0; 32]);
    files[1].extend_from_slice(&second);
    let disk = Disk::after(files, &[]);
    assert!(read_all(&alone(reopen(&disk, Mode::Append, 0).unwrap())) == expected);
}

#[test]
fn the_two_files_must_be_of_one_upper() {
    let disk = Disk::default();
    upper(&disk, Mode::Append, SIZE as u64);
    upper(&disk, Mode::Append, SIZE as u64);
    let mixed = Upper::open(disk.reopen(0), Some(disk.reopen(3)));
    assert!(matches!(mixed, Err(Error::Format(_))));
    assert!(matches!(
        Upper::open(disk.reopen(0), None),
        Err(Error::Invalid(_))
    ));
    assert!(matches!(
        Upper::open(disk.reopen(1), Some(disk.reopen(0))),
        Err(Error::Format(_))
    ));
}

#[test]
fn a_size_that_only_one_header_knows_is_that_of_the_data_file() {
    let disk = Disk::default();
    let stack = alone(upper(&disk, Mode::Hybrid, 4096));
    stack.resize(8192).unwrap();
    drop(stack);
    let mut files = disk.contents();
    files[1][48..56].copy_from_slice(&4096_u64.to_le_bytes());
    let disk = Disk::after(files, &[]);
    assert_eq!(reopen(&disk, Mode::Hybrid, 0).unwrap().virtual_size(), 8192);
    assert_eq!(disk.bytes(1)[48..56], 8192_u64.to_le_bytes());
}

#[test]
fn a_guest_cannot_make_its_upper_look_sealed() {
    let disk = Disk::default();
    let stack = alone(upper(&disk, Mode::Append, SIZE as u64));
    let mut forged = Vec::new();
    let options = overlaybd::commit::CommitOptions {
        virtual_size: Some(SIZE as u64),
        ..Default::default()
    };
    overlaybd::commit::LayerWriter::new(&mut forged, options)
        .unwrap()
        .finish()
        .unwrap();
    stack.write_at(&forged[4096..], 0).unwrap();
    let expected = read_all(&stack);
    drop(stack);
    assert!(!Upper::is_sealed(&Bytes(disk.bytes(0))).unwrap());
    assert!(read_all(&alone(reopen(&disk, Mode::Append, 0).unwrap())) == expected);
}
