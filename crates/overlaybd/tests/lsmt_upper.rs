//! Uppers: how each kind stores, what is recorded for discards, sealing, full and broken disks.

mod lsmt_support;

use lsmt_support::base::*;
use lsmt_support::*;
use overlaybd::commit::{commit_upper, CommitOptions};
use overlaybd::stack::{Extent, ExtentKind, Stack};
use overlaybd::upper::{Mode, Upper};
use overlaybd::Error;

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
