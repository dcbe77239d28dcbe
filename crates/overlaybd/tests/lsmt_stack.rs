//! Stacks: what requests are refused, sizes, the number of layers and records, parents.

mod lsmt_support;

use std::io;
use std::sync::Arc;

use lsmt_support::base::*;
use lsmt_support::world::merged;
use lsmt_support::*;
use overlaybd::io::ReadAt;
use overlaybd::layer::{Layer, MAX_WRITTEN_RECORDS};
use overlaybd::stack::{Lowers, Stack, MAX_LAYERS};
use overlaybd::upper::{Mode, Upper};
use overlaybd::Error;

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
