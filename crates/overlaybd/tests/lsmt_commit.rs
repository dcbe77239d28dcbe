//! Committed layers: packing, zeros, fusing, limits, raw images, and the algebra of merging.

mod lsmt_support;

use std::io::Write;
use std::sync::Arc;

use lsmt_support::world::merged;
use lsmt_support::*;
use overlaybd::commit::{flatten, from_raw, merge, CommitOptions, LayerWriter};
use overlaybd::io::WriteAt;
use overlaybd::layer::{Layer, MAX_WRITTEN_RECORDS};
use overlaybd::record::MAX_WRITTEN_LENGTH;
use overlaybd::stack::{ExtentKind, Lowers};
use overlaybd::upper::Mode;
use overlaybd::Error;
use proptest::prelude::*;

const SIZE: u64 = 64 << 10;

fn options(virtual_size: u64, keep_zeroes: bool) -> CommitOptions {
    CommitOptions {
        virtual_size: Some(virtual_size),
        keep_zeroes,
        ..Default::default()
    }
}

fn write(virtual_size: u64, keep_zeroes: bool, pieces: &[(u64, &[u8])]) -> Vec<u8> {
    let mut output = Vec::new();
    let mut writer = LayerWriter::new(&mut output, options(virtual_size, keep_zeroes)).unwrap();
    for (offset, data) in pieces {
        writer.write(*offset, data).unwrap();
    }
    writer.finish().unwrap();
    output
}

fn runs(file: &[u8]) -> Vec<(u64, u32, u64, bool)> {
    let layer = layer(file).unwrap();
    let runs = layer
        .index()
        .iter()
        .map(|record| (record.lba, record.length, record.physical, record.zeroed));
    runs.collect()
}

#[test]
fn zero_blocks_are_not_stored() {
    let mut data = vec![1; 5 * 4096];
    data[4096..8192].fill(0);
    data[12288..16384].fill(0);
    data[12288 + 4000] = 1;
    let file = write(SIZE, false, &[(0, &data)]);
    assert_eq!(runs(&file), [(0, 8, 8, false), (16, 24, 16, false)]);
    let file = write(SIZE, true, &[(0, &data)]);
    assert_eq!(
        runs(&file),
        [(0, 8, 8, false), (8, 8, 16, true), (16, 24, 16, false)]
    );
    // Blocks are those of the device, not of the call.
    let file = write(SIZE, false, &[(512, &[0; 4096]), (8192, &[0; 4096])]);
    assert_eq!(runs(&file), [(1, 8, 8, false)]);
}

#[test]
fn neighbours_fuse_and_long_runs_are_cut() {
    let block = [1; 4096];
    let pieces: Vec<(u64, &[u8])> = (0..8).map(|number| (number * 4096, &block[..])).collect();
    assert_eq!(runs(&write(SIZE, false, &pieces)), [(0, 64, 8, false)]);

    let size = 20 << 20;
    let file = write(size, false, &[(512, &vec![1; size as usize - 512])]);
    let limit = u64::from(MAX_WRITTEN_LENGTH);
    let last = size / 512 - 1 - 2 * limit;
    assert_eq!(
        runs(&file),
        [
            (1, MAX_WRITTEN_LENGTH, 8, false),
            (1 + limit, MAX_WRITTEN_LENGTH, 8 + limit, false),
            (1 + 2 * limit, last as u32, 8 + 2 * limit, false)
        ]
    );
    const {
        assert!(
            MAX_WRITTEN_LENGTH < 16383,
            "one of the others fuses below that only"
        )
    };

    let mut output = Vec::new();
    let mut writer = LayerWriter::new(&mut output, options(size, true)).unwrap();
    writer.write_zeroes(0, size / 2).unwrap();
    writer.write_zeroes(size / 2, size / 2).unwrap();
    let committed = writer.finish().unwrap();
    assert_eq!(
        (
            committed.records,
            committed.zero_records,
            committed.data_bytes
        ),
        (3, 3, 0)
    );
}

#[test]
fn the_size_of_the_file() {
    for records in [0, 1, 255, 256, 257, 512] {
        let blocks: Vec<Vec<u8>> = (0..records).map(|_| vec![1; 512]).collect();
        let pieces: Vec<(u64, &[u8])> = blocks
            .iter()
            .enumerate()
            .map(|(number, block)| (number as u64 * 1024, block.as_slice()))
            .collect();
        let file = write(1 << 20, false, &pieces);
        let padded = (records as u64).next_multiple_of(256);
        let index_end = 4096 + records as u64 * 512 + padded * 16;
        assert_eq!(file.len() as u64, index_end.next_multiple_of(4096) + 4096);
        let trailer = layer(&file).unwrap().trailer().clone();
        assert_eq!(
            (trailer.index_size, trailer.index_offset),
            (padded, 4096 + records as u64 * 512)
        );
        assert!(file[390..4096]
            .iter()
            .chain(&file[file.len() - 4096 + 390..])
            .all(|byte| *byte == 0));
    }
}

#[test]
fn pieces_that_cannot_be() {
    let mut output = Vec::new();
    assert!(matches!(
        LayerWriter::new(&mut output, CommitOptions::default()),
        Err(Error::Invalid(_))
    ));
    let mut writer = LayerWriter::new(&mut output, options(SIZE, true)).unwrap();
    writer.write(4096, &[1; 4096]).unwrap();
    for outcome in [
        writer.write(4096, &[1; 512]),
        writer.write(8193, &[1; 512]),
        writer.write(8192, &[1; 500]),
        writer.write(SIZE, &[1; 512]),
        writer.write_zeroes(0, 4096),
        writer.write_zeroes(8192, SIZE),
        writer.write_zeroes(8192, u64::MAX - 511),
    ] {
        assert!(matches!(outcome, Err(Error::Invalid(_))));
    }
    writer.finish().unwrap();
    layer(&output).unwrap();
}

/// Takes bytes until it is full.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > self.0 {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.0 -= bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_output_is_told() {
    let file = write(SIZE, false, &[(0, &[1; 20_000 / 512 * 512])]);
    let lowers = Lowers::merge(vec![Arc::new(layer(&file).unwrap())]).unwrap();
    for room in [0, 4095, 4096, 10_000, file.len() - 1] {
        let error = merge(&lowers, &mut Full(room), CommitOptions::default()).unwrap_err();
        assert!(error.is_out_of_space(), "room for {room} bytes");
    }
    merge(&lowers, &mut Full(file.len()), CommitOptions::default()).unwrap();
}

#[test]
fn too_many_records() {
    // At the bottom small gaps are filled when there would be too many records, so that it always fits.
    let pieces = MAX_WRITTEN_RECORDS as u64 + 100_000;
    let mut output = std::io::BufWriter::new(tempfile::tempfile().unwrap());
    let mut writer = LayerWriter::new(&mut output, options(pieces * 1024, false)).unwrap();
    for number in 0..pieces {
        writer
            .write(number * 1024, &[number as u8 | 1; 512])
            .unwrap();
    }
    let committed = writer.finish().unwrap();
    assert!(committed.records < MAX_WRITTEN_RECORDS as u64);
    let file = output.into_inner().unwrap();
    let layer = Arc::new(Layer::open(Arc::new(file)).unwrap());
    let stack = overlaybd::stack::Stack::open(Lowers::merge(vec![layer]).unwrap(), None).unwrap();
    let mut pair = [9; 1024];
    for number in [0, 499_999, 700_000, pieces - 1] {
        stack.read_at(&mut pair, number * 1024).unwrap();
        assert_eq!(
            (pair[0], pair[511], pair[512], pair[1023]),
            (number as u8 | 1, number as u8 | 1, 0, 0)
        );
    }

    // Between layers a gap is what lies below: it cannot be filled.
    let mut sink = std::io::sink();
    let mut writer = LayerWriter::new(&mut sink, options(pieces * 1024, true)).unwrap();
    let outcome = (0..pieces).try_for_each(|number| writer.write(number * 1024, &[1; 512]));
    assert!(matches!(outcome, Err(Error::Limit(_))));
}

#[test]
fn a_raw_image() {
    let mut raw = vec![0; 50_000];
    raw[5000..9000].fill(1);
    raw[20_480..24_576].fill(2);
    raw[49_990..].fill(3);
    let extents = [4096..12_288, 20_000..28_672, 49_152..50_000];
    for keep_zeroes in [false, true] {
        let mut file = Vec::new();
        let options = CommitOptions {
            keep_zeroes,
            ..Default::default()
        };
        let committed = from_raw(&Bytes(raw.clone()), extents.clone(), &mut file, options).unwrap();
        assert_eq!(committed.virtual_size, 50_176);
        assert_eq!(committed.data_bytes, 3 * 4096 + 1024);
        assert_eq!(committed.zero_records > 0, keep_zeroes);
        let mut expected = raw.clone();
        expected.resize(50_176, 0);
        assert!(read_all(&stack_of(&[file.clone()])) == expected);
        let below = write(1 << 20, false, &[(0, &[0xBB; 1 << 20])]);
        let stack = stack_of(&[below, file]);
        let kinds: Vec<ExtentKind> = stack
            .extents(0..50_176)
            .unwrap()
            .into_iter()
            .map(|extent| extent.kind)
            .collect();
        assert_eq!(kinds.contains(&ExtentKind::Zero), keep_zeroes);
    }
    let all: Vec<_> = std::iter::once(0..50_000).collect();
    let mut whole = Vec::new();
    let committed = from_raw(
        &Bytes(raw.clone()),
        all,
        &mut whole,
        CommitOptions::default(),
    )
    .unwrap();
    assert_eq!(
        committed.data_bytes,
        3 * 4096 + 1024,
        "zeros are found without help"
    );
    for wrong in [0..50_001_u64, 0..60_000] {
        let outcome = from_raw(
            &Bytes(raw.clone()),
            [wrong],
            &mut Vec::new(),
            CommitOptions::default(),
        );
        assert!(matches!(outcome, Err(Error::Invalid(_))));
    }
}

#[test]
fn a_sparse_raw_file() {
    let raw = tempfile::tempfile().unwrap();
    let size = 3_u64 << 40;
    raw.set_len(size).unwrap();
    raw.write_all_at(&[7; 8192], 1 << 20).unwrap();
    raw.write_all_at(&[8; 512], (5 << 39) + 512).unwrap();
    let extents = raw.data_extents(0..size).unwrap();
    let mut file = Vec::new();
    let committed = from_raw(&raw, extents, &mut file, CommitOptions::default()).unwrap();
    assert_eq!(
        (committed.virtual_size, committed.data_bytes),
        (size, 8192 + 4096)
    );
    let stack = stack_of(&[file]);
    let mut sector = [0; 512];
    stack.read_at(&mut sector, (5 << 39) + 512).unwrap();
    assert_eq!(sector, [8; 512]);
}

#[test]
fn devices_beyond_two_tebibytes() {
    let size = 5 << 40;
    let disk = Disk::default();
    let stack = alone(upper(&disk, Mode::Hybrid, size));
    let places = [0, (2 << 40) - 512, 2 << 40, (4 << 40) + 4096, size - 512];
    for (number, place) in places.into_iter().enumerate() {
        stack.write_at(&[number as u8 + 1; 512], place).unwrap();
    }
    stack.discard(places[3], 512).unwrap();
    let mut flat = Vec::new();
    flatten(&stack, &mut flat, CommitOptions::default()).unwrap();
    let sealed = stack.seal().unwrap().layer;
    for stack in [stack, stack_of(&[disk.bytes(0)]), stack_of(&[flat])] {
        for (place, expected) in places.into_iter().zip([1, 2, 3, 0, 5]) {
            let mut sector = [9; 512];
            stack.read_at(&mut sector, place).unwrap();
            assert_eq!(sector, [expected; 512], "at {place}");
        }
    }
    assert_eq!(sealed.virtual_size(), size);
}

/// A layer from runs of blocks; `None` is zeros.
fn any_layer() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec((0..3_u64, 1..6_u64, prop::option::of(1..=255_u8)), 0..12).prop_map(
        |runs| {
            let mut output = Vec::new();
            let mut writer = LayerWriter::new(&mut output, options(SIZE, true)).unwrap();
            let mut sector = 0;
            for (gap, length, fill) in runs {
                let start = sector + gap;
                let end = (start + length * 2).min(SIZE / 512);
                if start >= end {
                    break;
                }
                match fill {
                    Some(fill) => writer
                        .write(start * 512, &vec![fill; ((end - start) * 512) as usize])
                        .unwrap(),
                    None => writer
                        .write_zeroes(start * 512, (end - start) * 512)
                        .unwrap(),
                }
                sector = end;
            }
            writer.finish().unwrap();
            output
        },
    )
}

fn open(file: &[u8]) -> Arc<Layer> {
    Arc::new(layer(file).unwrap())
}

/// What a layer says of each sector, whatever its records look like.
fn meaning(file: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let over = |fill| {
        let below = write(SIZE, false, &[(0, &vec![fill; SIZE as usize])]);
        read_all(&stack_of(&[below, file.to_vec()]))
    };
    (over(0xA1), over(0xA2))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn merging_is_associative_and_idempotent(a in any_layer(), b in any_layer(), c in any_layer()) {
        let ab_c = merged(&[open(&merged(&[open(&a), open(&b)], true)), open(&c)], true);
        let a_bc = merged(&[open(&a), open(&merged(&[open(&b), open(&c)], true))], true);
        let abc = merged(&[open(&a), open(&b), open(&c)], true);
        prop_assert_eq!(runs(&ab_c), runs(&abc));
        prop_assert_eq!(runs(&a_bc), runs(&abc));
        prop_assert!(meaning(&a_bc) == meaning(&abc) && meaning(&ab_c) == meaning(&abc));
        prop_assert_eq!(runs(&merged(&[open(&abc)], true)), runs(&abc));
        let stack = stack_of(&[a, b, c]);
        prop_assert!(read_all(&stack) == read_all(&stack_of(std::slice::from_ref(&abc))));
        let bottom = merged(stack.lowers().layers(), false);
        prop_assert!(read_all(&stack_of(std::slice::from_ref(&bottom))) == read_all(&stack));
        prop_assert_eq!(layer(&bottom).unwrap().zero_records(), 0);
    }

    #[test]
    fn committed_data_tiles_the_file(a in any_layer(), b in any_layer()) {
        for file in [merged(&[open(&a), open(&b)], true), a, b] {
            let layer = layer(&file).unwrap();
            let mut physical = 8;
            for record in layer.index().iter() {
                prop_assert_eq!(record.physical, physical);
                prop_assert!(record.length <= MAX_WRITTEN_LENGTH && record.tag == 0);
                physical = record.physical_end();
            }
            prop_assert_eq!(physical * 512, layer.trailer().index_offset);
        }
    }
}

#[test]
fn layers_that_leave_the_size_to_others_keep_what_they_hold() {
    let sizeless = |block: u64, fill: u8| {
        let mut output = Vec::new();
        let mut writer = LayerWriter::new(&mut output, options(0, true)).unwrap();
        writer.write(block * 4096, &[fill; 4096]).unwrap();
        writer.write_zeroes((block + 1) * 4096, 4096).unwrap();
        writer.finish().unwrap();
        output
    };
    let parts = [sizeless(2, 1), sizeless(9, 2)];
    let layers = parts
        .iter()
        .map(|file| Arc::new(layer(file).unwrap()))
        .collect();
    let mut merged = Vec::new();
    let options = CommitOptions {
        keep_zeroes: true,
        ..Default::default()
    };
    let made = merge(&Lowers::merge(layers).unwrap(), &mut merged, options).unwrap();
    assert_eq!(
        (made.virtual_size, made.records, made.zero_records),
        (0, 4, 2)
    );
    let base = lsmt_support::base::base(0..16, 7, SIZE);
    let [low, high] = parts;
    assert_eq!(
        read_all(&stack_of(&[base.clone(), merged])),
        read_all(&stack_of(&[base, low, high]))
    );
}
