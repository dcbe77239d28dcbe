//! Opening sealed layers: every invariant of an index is checked, sizes that lie cost nothing, and what others write in
//! another way is read.

mod lsmt_support;

use std::io;
use std::sync::Arc;

use lsmt_support::*;
use overlaybd::commit::{CommitOptions, LayerWriter};
use overlaybd::io::ReadAt;
use overlaybd::layer::{Layer, MAX_RECORDS, MAX_VIRTUAL_SIZE};
use overlaybd::record::{Record, PADDING};
use overlaybd::{Error, Result, Uuid};
use proptest::prelude::*;

const SIZE: u64 = 1 << 20;

fn committed(fill: impl FnOnce(&mut LayerWriter<'_>)) -> Vec<u8> {
    let mut output = Vec::new();
    let options = CommitOptions {
        virtual_size: Some(SIZE),
        keep_zeroes: true,
        ..Default::default()
    };
    let mut writer = LayerWriter::new(&mut output, options).unwrap();
    fill(&mut writer);
    writer.finish().unwrap();
    output
}

/// A layer of 16 data sectors (so that data ends at sector 24) with these records as its index.
fn with_records(records: &[Record]) -> Result<Layer> {
    let mut file = committed(|writer| writer.write(0, &[7; 8192]).unwrap());
    let index = 4096 + 8192;
    for (number, record) in records.iter().enumerate() {
        file[index + number * 16..index + number * 16 + 16]
            .copy_from_slice(&record.encode().unwrap());
    }
    for number in records.len()..256 {
        file[index + number * 16..index + number * 16 + 16].copy_from_slice(&PADDING);
    }
    layer(&file)
}

fn record(lba: u64, length: u32, physical: u64, zeroed: bool) -> Record {
    Record {
        lba,
        length,
        physical,
        zeroed,
        tag: 0,
    }
}

fn assert_format(outcome: Result<Layer>, what: &str) {
    match outcome {
        Err(Error::Format(_)) => {}
        Err(error) => panic!("{what}: {error}"),
        Ok(_) => panic!("{what} was accepted"),
    }
}

#[test]
fn sealed_index_invariants() {
    for (what, records) in [
        (
            "everything in range",
            vec![
                record(0, 8, 8, false),
                record(8, 4, 8, true),
                record(12, 16, 8, false),
            ],
        ),
        (
            "zeroed at both ends of the range",
            vec![record(0, 8, 8, true), record(8, 8, 24, true)],
        ),
        (
            "two records of the same data",
            vec![record(0, 8, 8, false), record(8, 8, 8, false)],
        ),
        (
            "the highest sector",
            vec![record((1 << 50) - 2, 1, 8, false)],
        ),
    ] {
        let opened = with_records(&records).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(opened.index().iter().eq(records), "{what}");
    }
    for (what, records) in [
        (
            "an overlap",
            vec![record(0, 8, 8, false), record(7, 8, 8, false)],
        ),
        (
            "a wrong order",
            vec![record(8, 8, 8, false), record(0, 8, 8, false)],
        ),
        ("data in the header", vec![record(0, 8, 7, false)]),
        ("zeroed in the header", vec![record(0, 8, 7, true)]),
        ("data in the index", vec![record(0, 8, 17, false)]),
        ("zeroed behind the data", vec![record(0, 8, 25, true)]),
    ] {
        assert_format(with_records(&records), what);
    }
}

#[test]
fn padding_within_an_index_and_tags_are_dropped() {
    let mut file = committed(|writer| writer.write(0, &[7; 8192]).unwrap());
    let first = Record {
        tag: 9,
        ..record(0, 8, 8, false)
    }
    .encode()
    .unwrap();
    let second = Record {
        tag: 200,
        ..record(8, 8, 16, false)
    }
    .encode()
    .unwrap();
    let index: Vec<u8> = [first, PADDING, [0; 16], [0xFF; 16], second]
        .into_iter()
        .flatten()
        .collect();
    file[12288..12288 + index.len()].copy_from_slice(&index);
    let records: Vec<Record> = layer(&file).unwrap().index().iter().collect();
    assert_eq!(records, [record(0, 8, 8, false), record(8, 8, 16, false)]);
}

#[test]
fn a_record_of_the_longest_length_is_read() {
    let data = 16383 * 512;
    let mut file = committed(|writer| writer.write(0, &[7; 4096]).unwrap());
    let trailer = file.split_off(file.len() - 4096);
    file.truncate(4096);
    file.resize(4096 + data, 7);
    file.extend_from_slice(&record(0, 16383, 8, false).encode().unwrap());
    file.resize(4096 + data + 512, 0xFF);
    file.extend_from_slice(&trailer);
    let end = file.len();
    file[end - 4096 + 32..end - 4096 + 40].copy_from_slice(&(4096 + data as u64).to_le_bytes());
    file[end - 4096 + 40..end - 4096 + 48].copy_from_slice(&1_u64.to_le_bytes());
    assert_eq!(layer(&file).unwrap().data_bytes(), data as u64);
}

#[test]
fn headers_and_trailers_must_be_what_they_are() {
    let file = committed(|writer| writer.write(4096, &[7; 4096]).unwrap());
    let trailer = file.len() - 4096;
    let with = |at: usize, value: u8| {
        let mut file = file.clone();
        file[at] = value;
        layer(&file)
    };
    assert!(
        with(28, 0x03).is_ok(),
        "a sealed layer's header may say that it is not sealed"
    );
    assert!(
        with(trailer + 28, 0x26).is_ok(),
        "bit 5 alone is no reason to refuse"
    );
    assert!(with(30, 0x80).is_ok(), "unknown bits are ignored");
    assert!(
        with(24, 0).is_ok(),
        "the size of the structure is not looked at"
    );
    for (at, value, what) in [
        (0, 0, "the header's first magic"),
        (8, 0, "the header's second magic"),
        (28, 0x06, "a trailer as header"),
        (28, 0x01, "an index file"),
        (28, 0x37, "sparse and hybrid"),
        (trailer, 0, "the trailer's first magic"),
        (trailer + 23, 0, "the trailer's second magic"),
        (trailer + 28, 0x07, "a header as trailer"),
        (trailer + 28, 0x02, "a trailer that is not sealed"),
        (trailer + 28, 0x04, "a trailer without data"),
        (trailer + 33, 0, "an index in the header"),
        (trailer + 39, 0xFF, "an index beyond all"),
        (
            trailer + 47,
            0xFF,
            "more records than there is room in a number",
        ),
        (
            trailer + 41,
            2,
            "more records than there is room in the file",
        ),
    ] {
        assert_format(with(at, value), what);
    }
}

#[test]
fn uuids_that_are_none() {
    let mut file = committed(|_| {});
    for field in [4096 + 56, 4096 + 93] {
        file[field..field + 37].fill(b'z');
    }
    let opened = layer(&file).unwrap();
    assert_eq!((opened.uuid(), opened.parent_uuid()), (Uuid::nil(), None));
}

#[test]
fn every_truncation_is_an_error() {
    let file = committed(|writer| {
        writer.write(0, &[1; 8192]).unwrap();
        writer.write_zeroes(8192, 4096).unwrap();
    });
    for length in (0..file.len()).rev() {
        assert!(layer(&file[..length]).is_err(), "cut to {length} bytes");
    }
}

#[test]
fn a_missing_end_and_an_unsealed_upper_are_told_apart() {
    let said = |file: &[u8]| layer(file).map(|_| ()).unwrap_err().to_string();
    let mut file = committed(|writer| writer.write(0, &[1; 8192]).unwrap());
    file.truncate(file.len() - 4096);
    let cut = said(&file);
    assert!(cut.ends_with("the end is missing or damaged"), "{cut}");
    file[28] = 3; // header of an upper
    let open = said(&file);
    assert!(open.contains("an upper that is not sealed"), "{open}");
}

/// A file that claims to be huge, and is where it is read.
struct Claimed {
    length: u64,
    header: Vec<u8>,
    trailer: Vec<u8>,
}

impl ReadAt for Claimed {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if offset == 0 {
            buffer.copy_from_slice(&self.header);
        } else if offset == self.length - 4096 {
            buffer.copy_from_slice(&self.trailer);
        } else {
            assert!(buffer.len() <= 1 << 20, "read in pieces");
            return Err(io::Error::other("nothing here"));
        }
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.length)
    }
}

fn claiming(index_size: u64, length: u64) -> Result<Layer> {
    let file = committed(|_| {});
    let mut trailer = file[4096..].to_vec();
    trailer[40..48].copy_from_slice(&index_size.to_le_bytes());
    Layer::open(Arc::new(Claimed {
        length,
        header: file[..4096].to_vec(),
        trailer,
    }))
}

#[test]
fn sizes_that_lie_cost_nothing() {
    assert!(matches!(
        claiming(MAX_RECORDS + 1, 1 << 40),
        Err(Error::Limit(_))
    ));
    assert!(
        matches!(claiming(MAX_RECORDS, 1 << 40), Err(Error::Io(_))),
        "tries to read the first piece only"
    );
    assert!(matches!(claiming(1 << 60, u64::MAX), Err(Error::Format(_))));
}

#[test]
fn the_largest_device() {
    let mut output = Vec::new();
    let options = CommitOptions {
        virtual_size: Some(MAX_VIRTUAL_SIZE),
        ..Default::default()
    };
    let mut writer = LayerWriter::new(&mut output, options).unwrap();
    writer.write(3 << 41, &[1; 4096]).unwrap();
    writer.write(MAX_VIRTUAL_SIZE - 512, &[2; 512]).unwrap();
    writer.finish().unwrap();
    let stack = stack_of(&[output.clone()]);
    let mut sector = [0; 512];
    for (offset, expected) in [(3 << 41, 1), (MAX_VIRTUAL_SIZE - 512, 2), (1 << 58, 0)] {
        stack.read_at(&mut sector, offset).unwrap();
        assert_eq!(sector, [expected; 512], "at {offset}");
    }
    assert!(stack.read_at(&mut sector, MAX_VIRTUAL_SIZE).is_err());
    assert_eq!(stack.extents(0..MAX_VIRTUAL_SIZE).unwrap().len(), 4);

    let end = output.len();
    output[end - 4096 + 48..end - 4096 + 56].copy_from_slice(&(MAX_VIRTUAL_SIZE + 1).to_le_bytes());
    assert!(matches!(layer(&output), Err(Error::Limit(_))));
    let options = CommitOptions {
        virtual_size: Some(MAX_VIRTUAL_SIZE + 512),
        ..Default::default()
    };
    assert!(matches!(
        LayerWriter::new(&mut Vec::new(), options),
        Err(Error::Limit(_))
    ));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn records_come_back(
        lba in 0..(1_u64 << 50) - 1 - 16383, length in 1..=16383_u32, physical in 0..1_u64 << 55,
        zeroed: bool, tag: u8,
    ) {
        let record = Record { lba, length, physical, zeroed, tag };
        prop_assert_eq!(Record::decode(&record.encode().unwrap()), Some(record));
    }

    #[test]
    fn any_sixteen_bytes_are_a_record_or_padding(bytes: [u8; 16]) {
        if let Some(record) = Record::decode(&bytes) {
            prop_assert!(record.length >= 1);
            if record.end() < 1 << 50 {
                prop_assert_eq!(record.encode().unwrap(), bytes);
            }
        }
    }

    #[test]
    fn pieces_are_the_clip_of_the_index(
        runs in prop::collection::vec((0..300_u64, 1..40_u32, any::<bool>()), 0..60),
        from in 0..350_u64, sectors in 0..200_u64,
    ) {
        use overlaybd::index::{Index, Place};
        let records = runs.iter().enumerate().map(|(number, &(lba, length, zeroed))| Record {
            lba, length, zeroed, physical: 8 + number as u64 * 100, tag: number as u8,
        });
        // The model: what each sector is, written in order.
        let mut model = vec![Place::Hole; 700];
        for record in records.clone() {
            for sector in 0..u64::from(record.length) {
                model[(record.lba + sector) as usize] = if record.zeroed {
                    Place::Zero
                } else {
                    Place::Data { tag: record.tag, physical: record.physical + sector }
                };
            }
        }
        let index = Index::from_records(records).unwrap();
        let mut position = from;
        for piece in index.pieces(from, sectors) {
            prop_assert_eq!(piece.lba, position);
            prop_assert!(piece.length > 0);
            for sector in 0..piece.length {
                let expected = match piece.place {
                    Place::Data { tag, physical } => Place::Data { tag, physical: physical + sector },
                    other => other,
                };
                prop_assert_eq!(model[(position + sector) as usize], expected);
            }
            position += piece.length;
        }
        prop_assert_eq!(position, from + sectors);
        let mut end = 0;
        for record in index.iter() {
            prop_assert!(record.lba >= end && record.length >= 1);
            end = record.end();
        }
    }
}
