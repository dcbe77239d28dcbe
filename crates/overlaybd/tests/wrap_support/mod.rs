//! What the tests of wrappers share: sources in memory, content, and short ways to wrap it. No assertions.
#![allow(dead_code)] // Each test binary uses another part.

use std::io::{self, Cursor, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use overlaybd::io::ReadAt;
use overlaybd::zfile::{Options, Writer};
use overlaybd::{checksum, tar};

/// A file in memory that counts what is read from it.
#[derive(Default)]
pub struct Memory {
    pub bytes: Vec<u8>,
    pub fetched: AtomicU64,
}

impl Memory {
    pub fn shared(bytes: impl Into<Vec<u8>>) -> Arc<Self> {
        Arc::new(Self {
            bytes: bytes.into(),
            fetched: AtomicU64::new(0),
        })
    }
}

impl ReadAt for Memory {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let part = usize::try_from(offset)
            .ok()
            .and_then(|start| self.bytes.get(start..start.checked_add(buffer.len())?))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(part);
        self.fetched
            .fetch_add(buffer.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.len() as u64)
    }
}

/// Kinds of content that compress in different ways.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    Zeros,
    Text,
    Noise,
    Mixed,
}

/// `size` bytes, the same for the same seed.
pub fn content(kind: Content, seed: u64, size: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::with_capacity(size + 64);
    while bytes.len() < size {
        let word = next();
        match (kind, bytes.len() / 1000 % 3) {
            (Content::Zeros, _) | (Content::Mixed, 0) => bytes.extend_from_slice(&[0; 64]),
            (Content::Text, _) | (Content::Mixed, 1) => {
                bytes.extend_from_slice(format!("{} layers; ", word % 1000).as_bytes());
            }
            (Content::Noise | Content::Mixed, _) => bytes.extend_from_slice(&word.to_le_bytes()),
        }
    }
    bytes.truncate(size);
    bytes
}

/// A ZFile of `plain`, whose header is final or not.
pub fn zfile(plain: &[u8], options: Options, final_header: bool) -> Vec<u8> {
    let mut writer = Writer::new(Cursor::new(Vec::new()), options).expect("writer");
    writer.write_all(plain).expect("write");
    let (sink, summary) = if final_header {
        writer.finish_with_header()
    } else {
        writer.finish()
    }
    .expect("finish");
    let file = sink.into_inner();
    assert_eq!(summary.original_size, plain.len() as u64);
    assert_eq!(summary.stored_size, file.len() as u64);
    file
}

/// `payload` in a tar archive as we write it.
pub fn tarred(payload: &[u8]) -> Vec<u8> {
    let size = payload.len() as u64;
    [&tar::head(size)[..], payload, &tar::tail(size)].concat()
}

pub fn read_all(source: &dyn ReadAt) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; source.len()? as usize];
    source.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Write a little-endian number into a header or trailer of a ZFile and make its digest right again.
pub fn patch_zfile(header: &mut [u8], at: usize, field: &[u8]) {
    header[at..at + field.len()].copy_from_slice(field);
    header[28..32].fill(0);
    let digest = checksum::raw(0, &header[..512]);
    header[28..32].copy_from_slice(&digest.to_le_bytes());
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
