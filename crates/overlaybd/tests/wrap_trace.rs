//! Trace files against their vector, both checksums, and damage.

use overlaybd::trace::{decode, encode, Checksum, Operation, Record, ENTRY_SIZE};
use overlaybd::Error;
use proptest::prelude::*;

const VECTOR: Record = Record {
    operation: Operation::Read,
    layer: 3,
    count: 1024,
    offset: 256,
};
const VECTOR_BYTES: [u8; ENTRY_SIZE] = [
    0x52, 0, 0, 0, 3, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0,
];

#[test]
fn the_vector() {
    assert_eq!(VECTOR.encode(), VECTOR_BYTES);
    assert_eq!(Record::decode(&VECTOR_BYTES).expect("decode"), VECTOR);
    let raw = encode(&[VECTOR], Checksum::Raw);
    assert_eq!(
        raw[..ENTRY_SIZE],
        [
            0x20, 0x18, 0xEF, 0xC2, 0, 0, 0, 0, 0x18, 0, 0, 0, 0, 0, 0, 0, 0x62, 0xBD, 0xBC, 0x43,
            0, 0, 0, 0
        ]
    );
    let standard = encode(&[VECTOR], Checksum::Standard);
    assert_eq!(standard[16..20], 0xC747_518C_u32.to_le_bytes());
    assert_eq!(decode(&raw).expect("decode"), (vec![VECTOR], Checksum::Raw));
    assert_eq!(
        decode(&standard).expect("decode"),
        (vec![VECTOR], Checksum::Standard)
    );
}

/// The other writer leaves what memory held in the padding, and counts it in the checksum.
#[test]
fn padding_may_hold_anything() {
    let mut file = encode(&[VECTOR], Checksum::Raw);
    file[4..8].fill(0xAA);
    file[20..24].fill(0xBB);
    file[25..28].fill(0xCC);
    let crc = overlaybd::checksum::raw(0, &file[ENTRY_SIZE..]);
    file[16..20].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(
        decode(&file).expect("decode"),
        (vec![VECTOR], Checksum::Raw)
    );
}

fn records() -> impl Strategy<Value = Vec<Record>> {
    let record = (any::<bool>(), any::<u32>(), any::<u64>(), any::<i64>()).prop_map(
        |(read, layer, count, offset)| Record {
            operation: if read {
                Operation::Read
            } else {
                Operation::Write
            },
            layer,
            count,
            offset,
        },
    );
    prop::collection::vec(record, 0..40)
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(records in records(), standard: bool) {
        let kind = if standard { Checksum::Standard } else { Checksum::Raw };
        let file = encode(&records, kind);
        let (read, found) = decode(&file)?;
        prop_assert_eq!(read, records.clone());
        prop_assert!(found == kind || records.is_empty());
        for length in 0..file.len() {
            prop_assert!(matches!(decode(&file[..length]), Err(Error::Format(_))));
        }
    }

    #[test]
    fn damage_is_seen(records in records(), at: prop::sample::Index, bit in 0u8..8) {
        prop_assume!(!records.is_empty());
        let mut file = encode(&records, Checksum::Raw);
        let at = at.index(file.len());
        file[at] ^= 1 << bit;
        let is_padding = (4..8).contains(&at) || (20..24).contains(&at);
        prop_assert_eq!(decode(&file).is_err(), !is_padding);
    }

    #[test]
    fn random_bytes_are_no_trace(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(decode(&bytes).is_err());
    }
}

#[test]
fn sizes_that_cannot_be() {
    let good = encode(&[VECTOR], Checksum::Raw);
    for size in [u64::MAX, 1 << 60, 25, 23, 48] {
        let mut file = good.clone();
        file[8..16].copy_from_slice(&size.to_le_bytes());
        assert!(matches!(decode(&file), Err(Error::Format(_))), "{size}");
    }
    let mut file = good;
    file[ENTRY_SIZE] = b'X';
    let crc = overlaybd::checksum::raw(0, &file[ENTRY_SIZE..]);
    file[16..20].copy_from_slice(&crc.to_le_bytes());
    assert!(matches!(decode(&file), Err(Error::Format(_))), "operation");
}
