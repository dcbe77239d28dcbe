//! LSMT files made by hand, valid or not, and what they mean: written from the format's description, without the crate.

use overlaybd::{tar, zfile};

pub const SLOT: usize = 4096;
pub const SECTOR: usize = 512;
const MAGIC: [u8; 24] = [
    0x4C, 0x53, 0x4D, 0x54, 0x00, 0x01, 0x02, 0x00, 0x65, 0x7E, 0x63, 0xD2, 0x94, 0x44, 0x08, 0x4C,
    0xA2, 0xD2, 0xC8, 0xEC, 0x4F, 0xCF, 0xAE, 0x8A,
];
/// LBA of padding records.
const INVALID: u64 = (1 << 50) - 1;

/// A record as it stands in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub lba: u64,
    pub length: u64,
    pub place: u64,
    pub zeroed: bool,
}

impl Record {
    pub fn data(lba: u64, length: u64, place: u64) -> Self {
        Self {
            lba,
            length,
            place,
            zeroed: false,
        }
    }

    pub fn zero(lba: u64, length: u64, place: u64) -> Self {
        Self {
            lba,
            length,
            place,
            zeroed: true,
        }
    }

    pub fn bytes(self) -> [u8; 16] {
        let low = self.lba | self.length << 50;
        let high = self.place | u64::from(self.zeroed) << 55;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&low.to_le_bytes());
        bytes[8..].copy_from_slice(&high.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Self {
        let low = u64_at(bytes, 0);
        let high = u64_at(bytes, 8);
        Self {
            lba: low & INVALID,
            length: low >> 50,
            place: high & ((1 << 55) - 1),
            zeroed: high >> 55 & 1 == 1,
        }
    }
}

pub const PADDING: Record = Record {
    lba: INVALID,
    length: 0,
    place: 0,
    zeroed: false,
};

/// A header or trailer.
pub fn slot(flags: u32, index_offset: u64, index_size: u64, virtual_size: u64) -> [u8; SLOT] {
    let mut bytes = [0; SLOT];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, &MAGIC);
    put(24, &390u32.to_le_bytes());
    put(28, &flags.to_le_bytes());
    put(32, &index_offset.to_le_bytes());
    put(40, &index_size.to_le_bytes());
    put(48, &virtual_size.to_le_bytes());
    put(56, b"11111111-2222-3333-4444-555555555555");
    put(132, &[1, 1]);
    bytes
}

/// A committed layer with these records and this data, whatever they are.
pub fn committed(virtual_size: u64, records: &[Record], data: &[u8]) -> Vec<u8> {
    let offset = (SLOT + data.len()) as u64;
    let padded = records.len().next_multiple_of(256);
    let mut file = slot(0x07, 0, 0, virtual_size).to_vec();
    file.extend_from_slice(data);
    for record in records
        .iter()
        .chain(std::iter::repeat(&PADDING))
        .take(padded)
    {
        file.extend_from_slice(&record.bytes());
    }
    file.resize(file.len().next_multiple_of(SLOT), 0);
    file.extend_from_slice(&slot(0x06, offset, padded as u64, virtual_size));
    file
}

/// An upper that was sealed in place, with flags of its header as given.
pub fn sealed(virtual_size: u64, records: &[Record], data: &[u8], flags: u32) -> Vec<u8> {
    let offset = (SLOT + data.len()) as u64;
    let mut file = slot(flags, 0, 0, virtual_size).to_vec();
    file.extend_from_slice(data);
    for record in records {
        file.extend_from_slice(&record.bytes());
    }
    file.resize(file.len().next_multiple_of(SECTOR), 0xFF);
    file.resize(file.len().next_multiple_of(SLOT), 0);
    file.extend_from_slice(&slot(
        flags & !1 | 4,
        offset,
        records.len() as u64,
        virtual_size,
    ));
    file
}

/// The forms that a layer comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Raw,
    Zfile(zfile::Algorithm, /* final header */ bool),
}

/// Runs of a device of 64 KiB and its model.
pub fn sample(is_sealed: bool, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let virtual_size = 64 << 10;
    let mut state = seed.wrapping_mul(2).wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut below = |limit: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % limit
    };
    let mut model = vec![0; virtual_size];
    let mut data = Vec::new();
    let mut records = Vec::new();
    let mut lba = below(3);
    while lba < 128 {
        let length = (1 + below(12)).min(128 - lba);
        let place = ((SLOT + data.len()) / SECTOR) as u64;
        if below(4) == 0 {
            records.push(Record::zero(lba, length, place));
        } else {
            if is_sealed && below(3) == 0 {
                data.extend_from_slice(&[0xDD; SECTOR]);
            }
            let place = ((SLOT + data.len()) / SECTOR) as u64;
            for sector in lba..lba + length {
                let start = sector as usize * SECTOR;
                for (at, byte) in model[start..start + SECTOR].iter_mut().enumerate() {
                    *byte = ((at as u64 * 7 + sector) % 61) as u8 + below(3) as u8;
                }
            }
            data.extend_from_slice(&model[lba as usize * SECTOR..(lba + length) as usize * SECTOR]);
            records.push(Record::data(lba, length, place));
        }
        lba += length + below(6);
    }
    let file = if is_sealed {
        sealed(virtual_size as u64, &records, &data, 0x23)
    } else {
        committed(virtual_size as u64, &records, &data)
    };
    (file, model)
}

/// Put a layer into its form.
pub fn wrap(layer: &[u8], form: Form, in_tar: bool) -> Vec<u8> {
    let bytes = match form {
        Form::Raw => layer.to_vec(),
        Form::Zfile(algorithm, is_final) => zfile_of(layer, algorithm, is_final),
    };
    if in_tar {
        tar_of(&bytes)
    } else {
        bytes
    }
}

pub fn zfile_of(plain: &[u8], algorithm: zfile::Algorithm, is_final: bool) -> Vec<u8> {
    use std::io::Write as _;
    let options = zfile::Options {
        algorithm,
        ..zfile::Options::default()
    };
    let mut writer = zfile::Writer::new(std::io::Cursor::new(Vec::new()), options).expect("writer");
    writer.write_all(plain).expect("write");
    let finished = if is_final {
        writer.finish_with_header()
    } else {
        writer.finish()
    };
    finished.expect("finish").0.into_inner()
}

pub fn tar_of(payload: &[u8]) -> Vec<u8> {
    let size = payload.len() as u64;
    [&tar::head(size)[..], payload, &tar::tail(size)].concat()
}

/// What a plain LSMT file means, read in the most simple way: its size, and the bytes of any range of the device.
pub struct Oracle<'a> {
    file: &'a [u8],
    virtual_size: u64,
    records: Vec<Record>,
}

impl<'a> Oracle<'a> {
    /// `None` when trailer or index are not there.
    pub fn of(file: &'a [u8]) -> Option<Self> {
        let trailer = &file[file.len().checked_sub(SLOT)?..];
        let start = usize::try_from(u64_at(trailer, 32)).ok()?;
        let length = usize::try_from(u64_at(trailer, 40)).ok()?.checked_mul(16)?;
        let index = file.get(start..start.checked_add(length)?)?;
        let records = index
            .chunks_exact(16)
            .map(Record::parse)
            .filter(|record| record.lba != INVALID && record.length > 0)
            .collect();
        Some(Self {
            file,
            virtual_size: u64_at(trailer, 48),
            records,
        })
    }

    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// `None` when the file has no bytes where a record says so.
    pub fn read(&self, offset: u64, length: usize) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            let lba = (offset + bytes.len() as u64) / SECTOR as u64;
            let found = self
                .records
                .iter()
                .find(|record| (record.lba..record.lba + record.length).contains(&lba));
            match found {
                Some(record) if !record.zeroed => {
                    let start = usize::try_from(record.place + lba - record.lba)
                        .ok()?
                        .checked_mul(SECTOR)?;
                    bytes.extend_from_slice(self.file.get(start..start.checked_add(SECTOR)?)?);
                }
                _ => bytes.extend_from_slice(&[0; SECTOR]),
            }
        }
        Some(bytes)
    }
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
