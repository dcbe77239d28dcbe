//! Trace files: which ranges of which layer were read, so that a later start can warm its cache in that order.
//!
//! Encoding and decoding of the bytes only: no recording, no replay, no files.

use crate::fields::{u32_at, u64_at};
use crate::{checksum, Error, Result};

/// Bytes of the header and of each record.
pub const ENTRY_SIZE: usize = 24;
const MAGIC: u32 = 0xC2EF_1820;

/// What a record says was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

/// One access. `offset` and `count` are bytes of the plain layer, below tar and ZFile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub operation: Operation,
    /// Index of the layer in its stack, the bottom one being 0.
    pub layer: u32,
    pub count: u64,
    pub offset: i64,
}

/// Which of the two checksums a trace carries. Implementations do not read each other's traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// CRC-32C without inversions, from 0: the C++ implementation.
    Raw,
    /// Standard CRC-32C: the Rust implementation.
    Standard,
}

impl Checksum {
    fn of(self, records: &[u8]) -> u32 {
        match self {
            Self::Raw => checksum::raw(0, records),
            Self::Standard => checksum::standard(0, records),
        }
    }
}

impl Record {
    /// The 24 bytes of a record, padding zero.
    #[must_use]
    pub fn encode(&self) -> [u8; ENTRY_SIZE] {
        let mut bytes = [0; ENTRY_SIZE];
        bytes[0] = match self.operation {
            Operation::Read => b'R',
            Operation::Write => b'W',
        };
        bytes[4..8].copy_from_slice(&self.layer.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.count.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// # Errors
    /// [`Error::Format`] for an operation that is neither `R` nor `W`. Padding may hold anything.
    pub fn decode(bytes: &[u8; ENTRY_SIZE]) -> Result<Self> {
        let operation = match bytes[0] {
            b'R' => Operation::Read,
            b'W' => Operation::Write,
            other => {
                return Err(Error::Format(format!(
                    "trace record of operation {other:#04x}"
                )))
            }
        };
        Ok(Self {
            operation,
            layer: u32_at(bytes, 4),
            count: u64_at(bytes, 8),
            offset: u64_at(bytes, 16) as i64,
        })
    }
}

/// The bytes of a whole trace file.
#[must_use]
pub fn encode(records: &[Record], kind: Checksum) -> Vec<u8> {
    let mut file = vec![0; ENTRY_SIZE];
    for record in records {
        file.extend_from_slice(&record.encode());
    }
    let (header, body) = file.split_at_mut(ENTRY_SIZE);
    header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    header[8..16].copy_from_slice(&(body.len() as u64).to_le_bytes());
    header[16..20].copy_from_slice(&kind.of(body).to_le_bytes());
    file
}

/// The records of a trace file, and which checksum it carries.
///
/// # Errors
/// [`Error::Format`] if the magic is wrong, if the bytes are fewer than the header says, or if neither checksum fits.
pub fn decode(file: &[u8]) -> Result<(Vec<Record>, Checksum)> {
    let Some((header, body)) = file.split_first_chunk::<ENTRY_SIZE>() else {
        return Err(Error::Format(format!(
            "trace of {} bytes has no header",
            file.len()
        )));
    };
    if u32_at(header, 0) != MAGIC {
        return Err(Error::Format("trace: wrong magic".to_owned()));
    }
    let size = u64_at(header, 8);
    let body = usize::try_from(size)
        .ok()
        .and_then(|size| body.get(..size))
        .ok_or_else(|| {
            Error::Format(format!(
                "trace: the header promises {size} bytes of records, there are {}",
                body.len()
            ))
        })?;
    if body.len() % ENTRY_SIZE != 0 {
        return Err(Error::Format(format!(
            "trace: {size} bytes are no whole number of records"
        )));
    }
    let expected = u32_at(header, 16);
    let kind = [Checksum::Raw, Checksum::Standard]
        .into_iter()
        .find(|kind| kind.of(body) == expected)
        .ok_or_else(|| {
            Error::Format(format!(
                "trace: checksum {expected:#010x} does not match the records"
            ))
        })?;
    let mut records = Vec::with_capacity(body.len() / ENTRY_SIZE);
    let mut rest = body;
    while let Some((entry, after)) = rest.split_first_chunk::<ENTRY_SIZE>() {
        records.push(Record::decode(entry)?);
        rest = after;
    }
    Ok((records, kind))
}
