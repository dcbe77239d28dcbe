//! Stacks: what requests are refused, how uppers store, what is recorded for discards, full and broken disks, limits.

mod lsmt_support;

use std::io;
use std::sync::Arc;

use lsmt_support::world::merged;
use lsmt_support::*;
use overlaybd::commit::{commit_upper, CommitOptions, LayerWriter};
use overlaybd::io::ReadAt;
use overlaybd::layer::{Layer, MAX_WRITTEN_RECORDS};
use overlaybd::stack::{Extent, ExtentKind, Lowers, Stack, MAX_LAYERS};
use overlaybd::upper::{Mode, Upper};
use overlaybd::Error;

const SIZE: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// A layer with `fill` in one range of blocks.
fn base(blocks: std::ops::Range<u64>, fill: u8, virtual_size: u64) -> Vec<u8> {
    let mut output = Vec::new();
    let options = CommitOptions {
        virtual_size: Some(virtual_size),
        ..Default::default()
    };
    let mut writer = LayerWriter::new(&mut output, options).unwrap();
    writer
        .write(
            blocks.start * BLOCK,
            &vec![fill; ((blocks.end - blocks.start) * BLOCK) as usize],
        )
        .unwrap();
    writer.finish().unwrap();
    output
}

fn lowers(files: &[Vec<u8>]) -> Arc<Lowers> {
    Lowers::merge(
        files
            .iter()
            .map(|file| Arc::new(layer(file).unwrap()))
            .collect(),
    )
    .unwrap()
}

fn on_base(disk: &Disk, mode: Mode) -> Stack {
    Stack::open(
        lowers(&[base(8..16, 0xBA, SIZE)]),
        Some(upper(disk, mode, SIZE)),
    )
    .unwrap()
}

fn assert_invalid<T>(outcome: overlaybd::Result<T>) {
    match outcome {
        Err(Error::Invalid(_)) => {}
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("accepted"),
    }
}

#[test]
fn requests_that_cannot_be() {
    let disk = Disk::default();
    let stack = on_base(&disk, Mode::Hybrid);
    let mut buffer = [0; 1024];
    assert_invalid(stack.read_at(&mut buffer[..100], 0));
    assert_invalid(stack.read_at(&mut buffer, 100));
    assert_invalid(stack.read_at(&mut buffer, SIZE - 512));
    assert_invalid(stack.read_at(&mut buffer, u64::MAX - 511));
    assert_invalid(stack.try_read_at(&mut buffer, SIZE));
    assert_invalid(stack.write_at(&buffer[..511], 0));
    assert_invalid(stack.write_at(&buffer, SIZE - 512));
    assert_invalid(stack.discard(0, SIZE + 512));
    assert_invalid(stack.discard(512, u64::MAX - 511));
    assert_invalid(stack.write_zeroes(1, 512));
    assert_invalid(stack.extents(0..SIZE + 512));
    #[allow(clippy::reversed_empty_ranges, reason = "it is what is refused")]
    {
        assert_invalid(stack.extents(1024..512));
    }
    assert_invalid(stack.resize(SIZE - 512));
    assert_invalid(stack.resize(SIZE + 1));
    assert!(matches!(stack.resize(1 << 60), Err(Error::Limit(_))));
    assert_invalid(stack.replace_lowers(0, 0, Arc::new(layer(&base(0..1, 1, SIZE)).unwrap())));
    assert_invalid(stack.replace_lowers(1, 1, Arc::new(layer(&base(0..1, 1, SIZE)).unwrap())));
    assert_invalid(stack.replace_lowers(
        usize::MAX,
        2,
        Arc::new(layer(&base(0..1, 1, SIZE)).unwrap()),
    ));
    stack.write_at(&[], SIZE).unwrap();
    stack.read_at(&mut [], 0).unwrap();

    let read_only = stack_of(&[base(0..1, 1, SIZE)]);
    assert!(read_only.is_read_only() && !stack.is_read_only());
    assert_invalid(read_only.write_at(&buffer, 0));
    assert_invalid(read_only.discard(0, 512));
    assert_invalid(read_only.resize(SIZE * 2));
    assert_invalid(read_only.seal());
    assert_invalid(read_only.restack(upper(&disk, Mode::Hybrid, 0)));
    read_only.flush().unwrap();
}

#[test]
fn uppers_that_cannot_be() {
    let disk = Disk::default();
    let create = |mode, index: bool, size| {
        let index = index.then(|| disk.file() as Box<dyn overlaybd::io::WriteAt>);
        Upper::create(disk.file(), index, options(mode, size))
    };
    assert_invalid(create(Mode::Append, false, SIZE));
    assert_invalid(create(Mode::Hybrid, false, SIZE));
    assert_invalid(create(Mode::Sparse, true, SIZE));
    assert_invalid(create(Mode::Hybrid, true, 1000));
    assert!(matches!(
        create(Mode::Hybrid, true, 1 << 60),
        Err(Error::Limit(_))
    ));
    let used = disk.contents().len();
    upper(&disk, Mode::Sparse, 0);
    assert_invalid(Upper::create(
        disk.reopen(used),
        None,
        options(Mode::Sparse, SIZE),
    ));
}

#[test]
fn every_layer_gets_an_identity() {
    let disk = Disk::default();
    let first = upper(&disk, Mode::Hybrid, SIZE);
    let second = upper(&disk, Mode::Hybrid, SIZE);
    assert!(!first.uuid().is_nil() && first.uuid() != second.uuid());
    let one = layer(&base(0..1, 1, SIZE)).unwrap();
    let other = layer(&base(0..1, 1, SIZE)).unwrap();
    assert!(!one.uuid().is_nil() && one.uuid() != other.uuid());
}

#[test]
fn an_upper_without_size_takes_that_of_the_topmost_layer_that_has_one() {
    let files = [base(0..1, 1, SIZE), base(0..1, 2, 2 * SIZE), {
        let mut sizeless = base(0..1, 3, SIZE);
        let trailer = sizeless.len() - 4096;
        sizeless[trailer + 48..trailer + 56].fill(0);
        sizeless
    }];
    assert_eq!(lowers(&files).virtual_size(), 2 * SIZE);
    let disk = Disk::default();
    let stack = Stack::open(lowers(&files), Some(upper(&disk, Mode::Append, 0))).unwrap();
    assert_eq!(stack.virtual_size(), 2 * SIZE);
    for file in 0..2 {
        assert_eq!(
            disk.bytes(file)[48..56],
            (2 * SIZE).to_le_bytes(),
            "written down"
        );
    }
    let own = Stack::open(lowers(&files), Some(upper(&disk, Mode::Append, SIZE))).unwrap();
    assert_eq!(own.virtual_size(), SIZE);
}

#[test]
fn a_hybrid_upper_grows_by_distinct_sectors_only() {
    let disk = Disk::default();
    let stack = on_base(&disk, Mode::Hybrid);
    for round in 0..50_u8 {
        for block in [3, 9, 200, 4] {
            stack
                .write_at(&[round; BLOCK as usize], block * BLOCK)
                .unwrap();
        }
    }
    assert_eq!(disk.bytes(0).len() as u64, 4096 + 4 * BLOCK);
    assert_eq!(disk.bytes(1).len(), 4096 + 4 * 16);
    // Half over what is there, half beside it.
    stack
        .write_at(&[0x77; 2 * BLOCK as usize], 4 * BLOCK + 2048)
        .unwrap();
    assert_eq!(disk.bytes(0).len() as u64, 4096 + 5 * BLOCK + 2048);
    assert_eq!(disk.bytes(0)[28], 0x23);
    assert_eq!(disk.bytes(1)[28], 0x21);
    let statistics = stack.statistics();
    assert_eq!((statistics.depth, statistics.merged_records), (2, 1));
    assert_eq!(statistics.upper_data_bytes, 5 * BLOCK + 2048);
    assert_eq!(statistics.upper_file_bytes, disk.bytes(0).len() as u64);
    // A reader that knows nothing of hybrid uppers opens it as a log.
    let mut files = disk.contents();
    let expected = read_all(&stack);
    files[0][28] = 0x03;
    files[1][28] = 0x01;
    let disk = Disk::after(files, &[]);
    let log = Stack::open(
        stack.lowers(),
        Some(reopen(&disk, Mode::Append, 0).unwrap()),
    )
    .unwrap();
    assert!(read_all(&log) == expected);
    assert_eq!(log.statistics().upper_mode, Some(Mode::Append));
}

#[test]
fn flags_of_every_kind_of_upper() {
    for (mode, header, trailer) in [
        (Mode::Append, 0x03, 0x06),
        (Mode::Hybrid, 0x23, 0x26),
        (Mode::Sparse, 0x13, 0x16),
    ] {
        let disk = Disk::default();
        let mut options = options(mode, SIZE);
        options.user_tag = b"a tag".to_vec();
        let stack = alone(upper_with(&disk, options));
        stack.write_at(&[5; 1024], 512).unwrap();
        stack.discard(1024, 512).unwrap();
        let sealed = stack.seal().unwrap().layer;
        let file = disk.bytes(0);
        assert_eq!(
            file[28], header,
            "the header of a sealed upper stays as it was"
        );
        let opened = layer(&file).unwrap();
        assert_eq!(opened.flags(), trailer);
        assert_eq!(
            (opened.uuid(), opened.virtual_size()),
            (sealed.uuid(), SIZE)
        );
        assert_eq!(opened.trailer().user_tag, b"a tag");
        assert!(opened.index().iter().eq(sealed.index().iter()));
        assert_eq!(
            (opened.records(), opened.zero_records(), opened.data_bytes()),
            (2, 1, 512)
        );
        if mode == Mode::Sparse {
            assert_eq!(opened.trailer().index_offset, 4096 + SIZE);
        }
        assert!(stack.is_read_only());
        assert_invalid(stack.write_at(&[0; 512], 0));
        assert_invalid(reopen(&disk, mode, 0));
    }
}

fn extents(stack: &Stack) -> Vec<(u64, u64, ExtentKind)> {
    let range = 0..stack.virtual_size();
    let block = |extent: Extent| (extent.offset / BLOCK, extent.length / BLOCK, extent.kind);
    stack
        .extents(range)
        .unwrap()
        .into_iter()
        .map(block)
        .collect()
}

#[test]
fn a_discard_records_only_what_would_show() {
    use ExtentKind::{Data, Hole, Zero};
    for mode in [Mode::Append, Mode::Hybrid] {
        let disk = Disk::default();
        let stack = on_base(&disk, mode);
        stack.discard(100 * BLOCK, 50 * BLOCK).unwrap();
        assert_eq!(disk.bytes(1).len(), 4096, "holes stay holes");
        stack
            .write_at(&[1; 2 * BLOCK as usize], 20 * BLOCK)
            .unwrap();
        let before = disk.changes();
        stack.discard(0, 21 * BLOCK).unwrap();
        assert_eq!(
            extents(&stack),
            [
                (0, 8, Hole),
                (8, 8, Zero),
                (16, 4, Hole),
                (20, 1, Zero),
                (21, 1, Data),
                (22, 234, Hole)
            ]
        );
        let punched: Vec<_> = disk.journal()[before..]
            .iter()
            .filter_map(|change| match change {
                Change::Punch { file: 0, range } => Some(range.clone()),
                _ => None,
            })
            .collect();
        if mode == Mode::Hybrid {
            assert_eq!(
                punched,
                vec![std::ops::Range {
                    start: 4096,
                    end: 4096 + BLOCK
                }]
            );
        } else {
            assert!(punched.is_empty(), "a log keeps what it had");
        }
        let records = disk.bytes(1).len();
        stack.write_zeroes(8 * BLOCK, 13 * BLOCK).unwrap();
        assert_eq!(disk.bytes(1).len(), records, "zeros already");
        assert_eq!(stack.statistics().upper_data_bytes, BLOCK);
    }
}

#[test]
fn a_long_discard_is_cut_into_records() {
    let disk = Disk::default();
    let size = 64 << 20;
    let stack = Stack::open(
        lowers(&[base(0..9000, 0xBA, size)]),
        Some(upper(&disk, Mode::Hybrid, size)),
    )
    .unwrap();
    stack.discard(0, size).unwrap();
    assert!(read_all(&stack).iter().all(|byte| *byte == 0));
    let sealed = stack.seal().unwrap().layer;
    assert!(sealed
        .index()
        .iter()
        .all(|record| record.zeroed && record.length <= 16_376));
    assert_eq!(
        sealed
            .index()
            .iter()
            .map(|record| u64::from(record.length))
            .sum::<u64>(),
        9000 * 8
    );
    assert_eq!(
        layer(&disk.bytes(0)).unwrap().zero_records(),
        sealed.records()
    );
}

#[test]
fn a_long_write_is_cut_into_records() {
    let disk = Disk::default();
    let size = 32 << 20;
    let stack = alone(upper(&disk, Mode::Append, size));
    let data: Vec<u8> = (0..size).map(|byte| (byte / 512 % 251) as u8).collect();
    stack.write_at(&data, 0).unwrap();
    assert!(read_all(&stack) == data);
    drop(stack);
    let stack = alone(reopen(&disk, Mode::Append, 0).unwrap());
    assert!(read_all(&stack) == data);
    let sealed = stack.seal().unwrap().layer;
    assert!(sealed.index().iter().all(|record| record.length <= 16_376));
}

#[test]
fn a_full_disk_is_an_error_and_nothing_more() {
    for mode in [Mode::Append, Mode::Hybrid] {
        let disk = Disk::default();
        let stack = on_base(&disk, mode);
        stack.write_at(&[1; 4096], 0).unwrap();
        let mut model = read_all(&stack);
        // No room for data; for the data but not for its record; for the record in part.
        for free in [0, 511, 4095, 4096, 4096 + 7, 4096 + 15] {
            disk.set_free(Some(free));
            let error = stack.write_at(&[2; 4096], 32768).unwrap_err();
            assert!(error.is_out_of_space(), "{error}");
            assert!(read_all(&stack) == model);
            let error = stack.restack(upper_on_other_disk()).err().unwrap();
            assert!(error.is_out_of_space(), "{error}");
            assert!(read_all(&stack) == model);
            assert!(!stack.is_read_only());
        }
        disk.set_free(Some(0));
        // In place there is always room in a hybrid upper.
        assert_eq!(stack.write_at(&[3; 4096], 0).is_ok(), mode == Mode::Hybrid);
        disk.set_free(None);
        stack.write_at(&[3; 4096], 0).unwrap();
        stack.write_at(&[4; 4096], 32768).unwrap();
        model[..4096].fill(3);
        model[32768..36864].fill(4);
        assert!(read_all(&stack) == model);
        let lowers = stack.lowers();
        drop(stack);
        let stack = Stack::open(lowers, Some(reopen(&disk, mode, 0).unwrap())).unwrap();
        assert!(read_all(&stack) == model);
        stack.seal().unwrap();
        assert!(read_all(&stack) == model);
    }
}

fn upper_on_other_disk() -> Upper {
    upper(&Disk::default(), Mode::Hybrid, 0)
}

#[test]
fn a_broken_disk() {
    let disk = Disk::default();
    let stack = on_base(&disk, Mode::Hybrid);
    stack.write_at(&[1; 512], 0).unwrap();
    disk.fail_syncs_after(Some(0));
    assert!(matches!(stack.flush(), Err(Error::Io(_))));
    assert!(matches!(
        stack.restack(upper_on_other_disk()),
        Err(Error::Io(_))
    ));
    disk.fail_syncs_after(None);
    stack.flush().unwrap();
    assert_eq!(
        stack.depth(),
        2,
        "a restack that failed before the switch changes nothing"
    );
    stack.write_at(&[2; 512], 512).unwrap();

    // The syncs of both files before the switch succeed, that of the sealed layer fails.
    disk.fail_syncs_after(Some(2));
    assert!(matches!(
        stack.restack(upper_on_other_disk()),
        Err(Error::Io(_))
    ));
    disk.fail_syncs_after(None);
    assert_eq!(stack.depth(), 3);
    let mut sectors = [0; 1024];
    stack.read_at(&mut sectors, 0).unwrap();
    assert_eq!((sectors[0], sectors[512]), (1, 2));
    stack.write_at(&[3; 512], 0).unwrap();
    assert!(
        matches!(stack.flush(), Err(Error::Io(_))),
        "nothing above a lost layer is durable"
    );
}

#[test]
fn the_trailer_follows_when_all_else_is_on_stable_storage() {
    let disk = Disk::default();
    let stack = on_base(&disk, Mode::Hybrid);
    stack.write_at(&[1; 512], 0).unwrap();
    stack.seal().unwrap();
    let journal = disk.journal();
    let trailer = journal
        .iter()
        .rposition(|change| matches!(change, Change::Write { file: 0, bytes, .. } if bytes.starts_with(b"LSMT")))
        .unwrap();
    assert!(matches!(journal[trailer - 1], Change::Sync { file: 0 }));
    assert!(matches!(journal[trailer + 1], Change::Sync { file: 0 }));
}

#[test]
fn at_most_255_layers() {
    let files: Vec<Arc<Layer>> = (0..256)
        .map(|n| Arc::new(layer(&base(n / 4..n / 4 + 1, n as u8, SIZE)).unwrap()))
        .collect();
    assert!(matches!(Lowers::merge(files.clone()), Err(Error::Limit(_))));
    let full = Lowers::merge(files[..MAX_LAYERS].to_vec()).unwrap();
    let disk = Disk::default();
    let stack = Stack::open(full, Some(upper(&disk, Mode::Hybrid, 0))).unwrap();
    assert_eq!(stack.depth(), 256);
    let mut sector = [0; 512];
    stack.read_at(&mut sector, 10 * BLOCK).unwrap();
    assert_eq!(sector, [43; 512]);
    assert!(matches!(
        stack.restack(upper(&disk, Mode::Hybrid, 0)),
        Err(Error::Limit(_))
    ));
    stack.write_at(&[7; 512], 0).unwrap();
    // With some of them merged there is room again.
    let flat = merged(&stack.lowers().layers()[100..200], true);
    stack
        .replace_lowers(100, 100, Arc::new(layer(&flat).unwrap()))
        .unwrap();
    stack.restack(upper(&disk, Mode::Hybrid, 0)).unwrap();
    assert_eq!(stack.depth(), 158);
    stack.read_at(&mut sector, 10 * BLOCK).unwrap();
    assert_eq!(sector, [43; 512]);
}

#[test]
fn empty_layers_change_nothing() {
    let files = [base(0..4, 1, SIZE), base(2..6, 2, SIZE)];
    let expected = read_all(&stack_of(&files));
    for at in 0..=2 {
        let mut more = files.to_vec();
        more.insert(at, base(0..0, 0, SIZE));
        assert!(read_all(&stack_of(&more)) == expected);
    }
}

#[test]
fn the_parents_of_layers_are_checked_on_demand() {
    let disk = Disk::default();
    let stack = on_base(&disk, Mode::Hybrid);
    for _ in 0..3 {
        stack.restack(upper(&disk, Mode::Hybrid, 0)).unwrap();
    }
    stack.lowers().verify_parents().unwrap();
    let mut layers = stack.lowers().layers().to_vec();
    layers.swap(2, 3);
    assert_invalid(Lowers::merge(layers).unwrap().verify_parents());
}

#[test]
fn a_sealed_upper_and_its_commit_hold_the_same() {
    for mode in [Mode::Append, Mode::Hybrid, Mode::Sparse] {
        let disk = Disk::default();
        let stack = alone(upper(&disk, mode, SIZE));
        let mut random = Random(mode as u64);
        for number in 0..200 {
            let at = random.below(SIZE / 512 - 40) * 512;
            let length = 512 * (1 + random.below(40));
            if random.chance(4) {
                stack.discard(at, length).unwrap();
            } else {
                stack
                    .write_at(&vec![number as u8; length as usize], at)
                    .unwrap();
            }
        }
        let expected = read_all(&stack);
        drop(stack);
        let live = reopen(&disk, mode, 0).unwrap();
        let mut committed = Vec::new();
        let options = CommitOptions {
            keep_zeroes: true,
            ..Default::default()
        };
        commit_upper(&live, &mut committed, options).unwrap();
        alone(live).seal().unwrap();
        let below = base(0..256, 0xBB, SIZE);
        let sealed = stack_of(&[below.clone(), disk.bytes(0)]);
        let copied = stack_of(&[below, committed]);
        if mode != Mode::Sparse {
            assert!(read_all(&sealed) == read_all(&copied));
        }
        assert!(read_all(&stack_of(&[disk.bytes(0)])) == expected);
    }
}

/// A layer file whose data is a pattern, so that it needs no memory.
struct Pattern {
    file: Vec<u8>,
    data_end: u64,
}

impl ReadAt for Pattern {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if (4096..self.data_end).contains(&offset) {
            buffer.fill(0x5A);
            return Ok(());
        }
        let start = if offset == 0 {
            0
        } else {
            (offset - self.data_end + 4096) as usize
        };
        buffer.copy_from_slice(&self.file[start..start + buffer.len()]);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.data_end - 4096 + self.file.len() as u64)
    }
}

#[test]
fn an_upper_of_more_records_than_a_layer_has_can_be_sealed() {
    // Every other sector is data, and all of it is the same first sector of the file.
    let records = MAX_WRITTEN_RECORDS as u64 + 2000;
    let size = records * 1024;
    let mut file = base(0..0, 0, size);
    let mut trailer = file.split_off(4096);
    for number in 0..records {
        let record = overlaybd::record::Record {
            lba: number * 2,
            length: 1,
            physical: 8,
            zeroed: false,
            tag: 0,
        };
        file.extend_from_slice(&record.encode().unwrap());
    }
    trailer[32..40].copy_from_slice(&4608_u64.to_le_bytes());
    trailer[40..48].copy_from_slice(&records.to_le_bytes());
    file.extend_from_slice(&trailer);
    // header | index | trailer; the data between header and index is made up when it is read.
    let lower = Layer::open(Arc::new(Pattern {
        file,
        data_end: 4608,
    }))
    .unwrap();

    let disk = Disk::default();
    let stack = Stack::open(
        Lowers::merge(vec![Arc::new(lower)]).unwrap(),
        Some(upper(&disk, Mode::Hybrid, 0)),
    )
    .unwrap();
    let discarded = MAX_WRITTEN_RECORDS as u64 + 1000;
    stack.discard(0, discarded * 1024).unwrap();
    assert!(stack.statistics().upper_records > MAX_WRITTEN_RECORDS);
    let sealed = stack.restack(upper(&disk, Mode::Hybrid, 0)).unwrap().layer;
    assert!(
        sealed.records() <= MAX_WRITTEN_RECORDS,
        "{} records",
        sealed.records()
    );
    let mut pair = [0; 1024];
    for (number, expected) in [
        (0, 0),
        (1, 0),
        (70_000, 0),
        (900_000, 0),
        (discarded - 1, 0),
        (discarded, 0x5A),
    ] {
        stack.read_at(&mut pair, number * 1024).unwrap();
        assert_eq!(
            (pair[0], pair[511], pair[512], pair[1023]),
            (expected, expected, 0, 0),
            "pair {number}"
        );
    }
}
