//! Hostile LSMT files without wrappers.

use super::super::layers::{slot, Record, PADDING, SECTOR, SLOT};
use super::{Entry, Outcome};

const DEVICE: u64 = 8192;

/// A layer as the C++ implementation would lay it out, as small as can be, its trailer changed by `change`.
pub fn lsmt(records: &[Record], data: &[u8], change: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut file = slot(0x07, 0, 0, DEVICE).to_vec();
    file.extend_from_slice(data);
    let offset = file.len() as u64;
    for record in records {
        file.extend_from_slice(&record.bytes());
    }
    file.resize(file.len().next_multiple_of(SECTOR), 0xFF);
    let mut trailer = slot(0x06, offset, records.len() as u64, DEVICE);
    change(&mut trailer);
    file.extend_from_slice(&trailer);
    file
}

pub fn put(at: usize, field: impl AsRef<[u8]>) -> impl Fn(&mut [u8]) {
    move |trailer| trailer[at..at + field.as_ref().len()].copy_from_slice(field.as_ref())
}

pub fn put_u64(at: usize, value: u64) -> impl Fn(&mut [u8]) {
    put(at, value.to_le_bytes())
}

/// The valid layer under the wrappers: sectors of `A` and `B`, then one of nothing, then `C`.
pub fn good_layer() -> Vec<u8> {
    let data = [[b'A'; SECTOR], [b'B'; SECTOR], [b'C'; SECTOR]].concat();
    lsmt(
        &[Record::data(0, 2, 8), Record::data(3, 1, 10)],
        &data,
        |_| (),
    )
}

pub fn all() -> Vec<Entry> {
    use Outcome::{Format, Limit, Shows};
    let one = [b'A'; SECTOR];
    let two = [[b'A'; SECTOR], [b'B'; SECTOR]].concat();
    let first = [Record::data(0, 1, 8)];
    let of = |records: &[Record]| lsmt(records, &two, |_| ());
    let with = |change: &dyn Fn(&mut [u8])| lsmt(&first, &one, change);
    let filler = |record: u64| Record {
        lba: record,
        length: 16_383,
        place: (1 << 55) - 1,
        zeroed: true,
    };
    let mut bad_uuid = good_layer();
    let trailer = bad_uuid.len() - SLOT;
    bad_uuid[trailer + 56..trailer + 130].fill(0xFE);
    vec![
        ("lsmt-good", good_layer(), Shows(b"A")),
        ("lsmt-no-bytes", Vec::new(), Format),
        (
            "lsmt-header-alone",
            slot(0x07, 0, 0, DEVICE).to_vec(),
            Format,
        ),
        (
            "lsmt-header-twice",
            slot(0x07, 0, 0, DEVICE).repeat(2),
            Format,
        ),
        ("lsmt-trailer-unsealed", with(&put(28, [0x02])), Format),
        ("lsmt-trailer-of-an-index", with(&put(28, [0x04])), Format),
        ("lsmt-sparse-and-hybrid", with(&put(28, [0x36])), Format),
        (
            "lsmt-index-of-2-60-records",
            with(&put_u64(40, 1 << 60)),
            Format,
        ),
        (
            "lsmt-index-size-overflows",
            with(&put_u64(40, u64::MAX / 16 + 2)),
            Format,
        ),
        (
            "lsmt-index-size-one-too-many",
            with(&put_u64(40, 33)),
            Format,
        ),
        (
            "lsmt-index-beyond-the-end",
            with(&put_u64(32, 1 << 30)),
            Format,
        ),
        (
            "lsmt-index-offset-overflows",
            with(&put_u64(32, u64::MAX - 15)),
            Format,
        ),
        ("lsmt-index-in-the-header", with(&put_u64(32, 0)), Format),
        (
            "lsmt-index-before-its-data",
            with(&put_u64(32, 4096)),
            Format,
        ),
        (
            "lsmt-virtual-size-of-2-64",
            with(&put_u64(48, u64::MAX)),
            Limit,
        ),
        ("lsmt-virtual-size-none", with(&put_u64(48, 0)), Shows(b"")),
        (
            "lsmt-virtual-size-of-2-40",
            with(&put_u64(48, 1 << 40)),
            Shows(b"A"),
        ),
        (
            "lsmt-virtual-size-below-its-data",
            with(&put_u64(48, 512)),
            Shows(b"A"),
        ),
        ("lsmt-uuids-not-text", bad_uuid, Shows(b"A")),
        (
            "lsmt-records-unsorted",
            of(&[Record::data(3, 1, 8), Record::data(0, 1, 9)]),
            Format,
        ),
        (
            "lsmt-records-overlap",
            of(&[Record::data(0, 2, 8), Record::data(1, 1, 9)]),
            Format,
        ),
        (
            "lsmt-record-twice",
            of(&[Record::data(0, 1, 8), Record::data(0, 1, 8)]),
            Format,
        ),
        (
            "lsmt-record-beyond-the-data",
            of(&[Record::data(0, 3, 8)]),
            Format,
        ),
        (
            "lsmt-record-far-beyond-the-data",
            of(&[Record::data(0, 1, (1 << 55) - 1)]),
            Format,
        ),
        (
            "lsmt-record-in-the-header",
            of(&[Record::data(0, 1, 7)]),
            Format,
        ),
        (
            "lsmt-zeroed-in-the-header",
            of(&[Record::zero(0, 1, 0)]),
            Format,
        ),
        (
            "lsmt-zeroed-beyond-the-data",
            of(&[Record::zero(0, 1, 11)]),
            Format,
        ),
        (
            "lsmt-zeroed-at-the-end-of-data",
            of(&[Record::zero(0, 16_383, 10)]),
            Shows(&[0]),
        ),
        (
            "lsmt-record-beyond-all-sectors",
            of(&[Record::zero((1 << 50) - 2, 16_383, 8)]),
            Format,
        ),
        (
            "lsmt-record-beyond-the-device",
            of(&[Record::data(0, 1, 8), Record::data(1 << 40, 1, 9)]),
            Shows(b"A"),
        ),
        (
            "lsmt-records-without-length",
            of(&[
                Record::data(9, 0, 1),
                Record::data(1, 1, 8),
                Record::data(0, 0, u64::MAX >> 9),
            ]),
            Shows(&[0]),
        ),
        (
            "lsmt-padding-and-filler-counted",
            of(&[
                PADDING,
                Record::data(0, 1, 8),
                PADDING,
                filler((1 << 50) - 1),
            ]),
            Shows(b"A"),
        ),
        (
            "lsmt-data-shared-by-records",
            of(&[Record::data(0, 1, 9), Record::data(1, 1, 9)]),
            Shows(b"B"),
        ),
    ]
}
