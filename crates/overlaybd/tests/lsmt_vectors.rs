//! The format's published test vectors: exact bytes of records, layers, uppers and merged indexes.

mod lsmt_support;

use lsmt_support::*;
use overlaybd::commit::{CommitOptions, Committed, LayerWriter};
use overlaybd::header::Header;
use overlaybd::index::{Index, Place};
use overlaybd::layer::Variant;
use overlaybd::record::{Record, PADDING};
use overlaybd::upper::{Mode, Upper};
use overlaybd::{Error, Uuid};

const MIB: u64 = 1 << 20;
const ONES: &str = "11111111-2222-3333-4444-555555555555";
const LETTERS: &str = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee";

fn bytes(hex: &str) -> Vec<u8> {
    hex.split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}

fn record(lba: u64, length: u32, physical: u64, zeroed: bool, tag: u8) -> Record {
    Record {
        lba,
        length,
        physical,
        zeroed,
        tag,
    }
}

fn commit(options: CommitOptions, fill: impl FnOnce(&mut LayerWriter<'_>)) -> (Vec<u8>, Committed) {
    let mut output = Vec::new();
    let options = CommitOptions {
        virtual_size: Some(MIB),
        ..options
    };
    let mut writer = LayerWriter::new(&mut output, options).unwrap();
    fill(&mut writer);
    let committed = writer.finish().unwrap();
    assert_eq!(committed.file_bytes, output.len() as u64);
    (output, committed)
}

fn minimal(options: CommitOptions) -> Vec<u8> {
    commit(options, |writer| {
        writer.write(65536, &[0xA5; 4096]).unwrap()
    })
    .0
}

#[test]
fn t1_records() {
    let vectors = [
        (
            record(0, 1, 8, false, 0),
            "00 00 00 00 00 00 04 00 08 00 00 00 00 00 00 00",
        ),
        (
            record(128, 8, 8, false, 0),
            "80 00 00 00 00 00 20 00 08 00 00 00 00 00 00 00",
        ),
        (
            record(16383, 16383, 1, false, 0),
            "FF 3F 00 00 00 00 FC FF 01 00 00 00 00 00 00 00",
        ),
        (
            record(2048, 512, 16, true, 0),
            "00 08 00 00 00 00 00 08 10 00 00 00 00 00 80 00",
        ),
        (
            record(5, 3, 70, false, 7),
            "05 00 00 00 00 00 0C 00 46 00 00 00 00 00 00 07",
        ),
        (
            record((1 << 50) - 2, 1, (1 << 55) - 1, false, 0),
            "FE FF FF FF FF FF 07 00 FF FF FF FF FF FF 7F 00",
        ),
    ];
    for (record, hex) in vectors {
        let encoded = record.encode().unwrap();
        assert_eq!(encoded.to_vec(), bytes(hex), "{record:?}");
        assert_eq!(Record::decode(&encoded), Some(record));
    }
    assert_eq!(
        PADDING.to_vec(),
        bytes("FF FF FF FF FF FF 03 00 00 00 00 00 00 00 00 00")
    );
    assert_eq!(Record::decode(&PADDING), None);
    // Filler of sealed uppers, and what a hole in a file reads as.
    assert_eq!(Record::decode(&[0xFF; 16]), None);
    assert_eq!(Record::decode(&[0; 16]), None);
}

#[test]
fn records_out_of_width_are_rejected() {
    for wrong in [
        record(0, 0, 8, false, 0),
        record(0, 16384, 8, false, 0),
        record((1 << 50) - 1, 1, 8, false, 0),
        record((1 << 50) - 2, 2, 8, false, 0),
        record(1 << 50, 1, 8, false, 0),
        record(0, 1, 1 << 55, false, 0),
    ] {
        assert!(
            matches!(wrong.encode(), Err(Error::Invalid(_))),
            "{wrong:?}"
        );
    }
}

#[test]
fn t2_minimal_layer() {
    let file = minimal(CommitOptions {
        uuid: nil(),
        ..Default::default()
    });
    assert_eq!(
        sha256(&file),
        "0ddef161c91c8a423529fd6075312201d8e698e8a0dfb6442d24ab92df6658c2"
    );
    assert_eq!(file.len(), 16384);
    let layer = layer(&file).unwrap();
    assert_eq!(layer.variant(), Variant::Committed);
    assert_eq!(
        (layer.flags(), layer.records(), layer.zero_records()),
        (6, 1, 0)
    );
    assert_eq!((layer.data_bytes(), layer.virtual_size()), (4096, MIB));
    assert_eq!((layer.uuid(), layer.parent_uuid()), (Uuid::nil(), None));
    assert_eq!(
        (layer.trailer().index_offset, layer.trailer().index_size),
        (8192, 256)
    );
    assert_eq!(
        layer.index().iter().collect::<Vec<_>>(),
        [record(128, 8, 8, false, 0)]
    );

    let mut expected = vec![0; MIB as usize];
    expected[65536..69632].fill(0xA5);
    assert_eq!(read_all(&stack_of(&[file])), expected);
}

#[test]
fn t2_parent_as_nil_text_is_none() {
    let mut file = minimal(CommitOptions {
        uuid: nil(),
        ..Default::default()
    });
    for header in [0, 0x3000] {
        file[header + 93..header + 129].copy_from_slice(b"00000000-0000-0000-0000-000000000000");
    }
    assert_eq!(
        sha256(&file),
        "fa78418e5906ee50e712bf1e109e31f0af785ccb27ea306912166f85e1e27911"
    );
    assert_eq!(layer(&file).unwrap().parent_uuid(), None);
}

#[test]
fn t2_uuids_are_written_in_lower_case_and_read_in_either() {
    let options = CommitOptions {
        uuid: Some(ONES.parse().unwrap()),
        parent_uuid: Some(LETTERS.parse().unwrap()),
        ..Default::default()
    };
    let lower = minimal(options);
    assert_eq!(
        sha256(&lower),
        "7ac5eb46bc67506b5411e89e2f1458c5060f0b084e8f7018bb76cecd30fe3d01"
    );
    let mut upper = lower.clone();
    for header in [0, 0x3000] {
        upper[header + 56..header + 130].make_ascii_uppercase();
    }
    assert_eq!(
        sha256(&upper),
        "fd6cd2911b4700c6f54e578f752d6363189943bd3286d075913c073a2e01bea8"
    );
    for file in [lower, upper] {
        let layer = layer(&file).unwrap();
        assert_eq!(layer.uuid(), ONES.parse::<Uuid>().unwrap());
        assert_eq!(layer.parent_uuid(), Some(LETTERS.parse().unwrap()));
    }
}

#[test]
fn t3_zeroed_record() {
    let options = CommitOptions {
        uuid: nil(),
        keep_zeroes: true,
        ..Default::default()
    };
    let (file, committed) = commit(options, |writer| {
        writer.write(0, &[0x11; 4096]).unwrap();
        writer.write(4096, &[0; 4096]).unwrap();
        writer.write(8192, &[0x22; 4096]).unwrap();
    });
    assert_eq!(
        sha256(&file),
        "a1ae037b012abfe4862fcd15886f4fc451711cb57ee8a918439bc4f9d83b7e4d"
    );
    assert_eq!(
        (
            committed.records,
            committed.zero_records,
            committed.data_bytes
        ),
        (3, 1, 8192)
    );
    let layer = layer(&file).unwrap();
    let records: Vec<Record> = layer.index().iter().collect();
    assert_eq!(
        records,
        [
            record(0, 8, 8, false, 0),
            record(8, 8, 16, true, 0),
            record(16, 8, 16, false, 0)
        ]
    );
    assert_eq!(
        (layer.records(), layer.zero_records(), layer.data_bytes()),
        (3, 1, 8192)
    );
    let content = read_all(&stack_of(&[file]));
    assert_eq!(
        (content[0], content[4096], content[8192], content[12288]),
        (0x11, 0, 0x22, 0)
    );
}

#[test]
fn t4_empty_layer() {
    let (file, _) = commit(
        CommitOptions {
            uuid: nil(),
            ..Default::default()
        },
        |_| {},
    );
    assert_eq!(file.len(), 8192);
    assert_eq!(
        sha256(&file),
        "879e799be0c083de4e328a3568e05004bb9a64fd4968362efe77db8a9702b2d6"
    );
    let layer = layer(&file).unwrap();
    assert_eq!(
        (
            layer.records(),
            layer.trailer().index_offset,
            layer.trailer().index_size
        ),
        (0, 4096, 0)
    );
    assert_eq!(read_all(&stack_of(&[file])), vec![0; MIB as usize]);
}

#[test]
fn t5_append_only_pair_then_sealed() {
    let disk = Disk::default();
    let mut options = options(Mode::Append, MIB);
    options.uuid = Some(ONES.parse().unwrap());
    let stack = alone(upper_with(&disk, options));
    stack.write_at(&[0xA5; 4096], 65536).unwrap();
    assert_eq!(
        sha256(&disk.bytes(0)),
        "5df39c897ad09e8ab561c361b65810a3be8766002e380d512b9a98d51b2992b7"
    );
    assert_eq!(
        sha256(&disk.bytes(1)),
        "acaf93b2b23eebeb185f2e5958c1d5f5a6d67b38dbe5e19968a786a2f71bfad1"
    );
    assert_eq!((disk.bytes(0).len(), disk.bytes(1).len()), (8192, 4112));

    let sealed = stack.seal().unwrap().layer;
    let file = disk.bytes(0);
    assert_eq!(
        sha256(&file),
        "a12621dbbc2b4b98da72d29af659cdfe034567566a7e8c2339bb83199eab6040"
    );
    assert_eq!(
        (sealed.records(), sealed.variant()),
        (1, Variant::SealedInPlace)
    );
    assert!(Upper::is_sealed(&Bytes(file.clone())).unwrap());

    // The other writer puts the trailer directly behind the last sector of the index, with anything as filler.
    let mut other = file[..8704].to_vec();
    other[8208..8704].fill(0x5C);
    other.extend_from_slice(&file[12288..]);
    assert_eq!(other.len(), 12800);
    for file in [file, other] {
        let layer = layer(&file).unwrap();
        assert_eq!(
            (layer.variant(), layer.flags()),
            (Variant::SealedInPlace, 6)
        );
        assert_eq!(
            (layer.trailer().index_offset, layer.trailer().index_size),
            (8192, 1)
        );
        assert_eq!(read_all(&stack_of(&[file]))[65536..69632], [0xA5; 4096]);
    }
}

#[test]
fn t6_log_replay() {
    let index = Index::from_records([
        record(0, 8, 8, false, 0),
        record(4, 8, 16, false, 0),
        record(2, 1, 8, true, 0),
        record(1, 3, 24, false, 0),
    ])
    .unwrap();
    let records: Vec<Record> = index.iter().collect();
    assert_eq!(
        records,
        [
            record(0, 1, 8, false, 0),
            record(1, 3, 24, false, 0),
            record(4, 8, 16, false, 0)
        ]
    );
}

#[test]
fn t6_stack_merge() {
    // Tags number the layers from the bottom here, from the top in the vector.
    let index = Index::from_records([
        record(0, 32, 8, false, 0),
        record(64, 16, 40, false, 0),
        record(4, 4, 8, false, 1),
        record(60, 8, 12, true, 1),
        record(6, 2, 8, false, 2),
        record(70, 4, 10, false, 2),
    ])
    .unwrap();
    let records: Vec<Record> = index.iter().collect();
    assert_eq!(
        records,
        [
            record(0, 4, 8, false, 0),
            record(4, 2, 8, false, 1),
            record(6, 2, 8, false, 2),
            record(8, 24, 16, false, 0),
            record(60, 8, 12, true, 1),
            record(68, 2, 44, false, 0),
            record(70, 4, 10, false, 2),
            record(74, 6, 50, false, 0),
        ]
    );
    let places: Vec<Place> = index.pieces(30, 40).map(|piece| piece.place).collect();
    assert_eq!(
        places,
        [
            Place::Data {
                tag: 0,
                physical: 38
            },
            Place::Hole,
            Place::Zero,
            Place::Data {
                tag: 0,
                physical: 44
            }
        ]
    );
}

#[test]
fn headers_hold_every_field() {
    let header = Header {
        flags: 0x23,
        index_offset: 4096,
        index_size: 77,
        virtual_size: 1 << 58,
        uuid: ONES.parse().unwrap(),
        parent_uuid: Some(LETTERS.parse().unwrap()),
        user_tag: vec![b'x'; 256],
    };
    let encoded = header.encode().unwrap();
    assert_eq!(encoded[..8], *b"LSMT\x00\x01\x02\x00");
    assert_eq!(encoded[24..28], 390_u32.to_le_bytes());
    assert_eq!(encoded[132..134], [1, 1]);
    assert!(encoded[390..].iter().all(|byte| *byte == 0));
    assert_eq!(Header::decode(&encoded).unwrap(), header);
    let too_long = Header {
        user_tag: vec![b'x'; 257],
        ..header
    };
    assert!(matches!(too_long.encode(), Err(Error::Invalid(_))));
}

#[test]
fn flag_bits() {
    let header = |flags| {
        let header = Header {
            flags,
            index_offset: 0,
            index_size: 0,
            virtual_size: 0,
            uuid: Uuid::nil(),
            parent_uuid: None,
            user_tag: Vec::new(),
        };
        Header::decode(&header.encode().unwrap())
    };
    assert!(
        matches!(header(0x33), Err(Error::Format(_))),
        "sparse and hybrid at once"
    );
    for flags in [0x07, 0x27, 0x0F, 0xFFFF_FFC7] {
        assert_eq!(
            header(flags).unwrap().flags,
            flags,
            "unknown bits and bit 5 alone are read"
        );
    }
}
