//! One header block of a tar archive: its fields, its checksum, its numbers.
//!
//! Knows nothing of where a block lies or what follows it.

use super::BLOCK_SIZE;

const SIZE: std::ops::Range<usize> = 124..136;
const CHECKSUM: std::ops::Range<usize> = 148..156;
const TYPE: usize = 156;
const MAGIC: std::ops::Range<usize> = 257..265;

/// What a header announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Regular,
    /// Pax records for the next member only.
    Pax,
    /// Something that describes the next member or all others, and that says nothing of its size.
    Skipped,
    Other(u8),
}

/// A header block whose magic and checksum are right.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub kind: Kind,
    /// The size field in bytes; `None` when it is no number or a negative one.
    pub size: Option<u64>,
}

impl Block {
    /// `None` when the bytes are not a tar header.
    pub fn parse(bytes: &[u8; BLOCK_SIZE]) -> Option<Self> {
        let posix = bytes[MAGIC].starts_with(b"ustar") && &bytes[263..265] == b"00";
        let gnu = &bytes[MAGIC] == b"ustar  \0";
        if !(posix || gnu) || !checksum_fits(bytes) {
            return None;
        }
        let kind = match bytes[TYPE] {
            b'0' | 0 | b'7' => Kind::Regular,
            b'x' => Kind::Pax,
            b'g' | b'L' | b'K' => Kind::Skipped,
            other => Kind::Other(other),
        };
        Some(Self {
            kind,
            size: number(&bytes[SIZE]),
        })
    }
}

/// A header block as the reference implementation writes it: numbers are octal, padded with spaces on the left.
pub(super) struct Builder([u8; BLOCK_SIZE]);

impl Builder {
    pub fn new(name: &str, size: u64, kind: u8) -> Self {
        let mut builder = Self([0; BLOCK_SIZE]);
        builder.text(0, name);
        builder.text(SIZE.start, &format!("{size:>11o} "));
        builder.0[TYPE] = kind;
        builder
    }

    pub fn text(&mut self, at: usize, text: &str) {
        self.0[at..at + text.len()].copy_from_slice(text.as_bytes());
    }

    /// The magic and version of a file that is still being written, which no reader takes for an archive.
    pub fn unfinished(mut self) -> [u8; BLOCK_SIZE] {
        self.text(MAGIC.start, "xxtar\0xx");
        self.0
    }

    pub fn finish(mut self) -> [u8; BLOCK_SIZE] {
        self.text(MAGIC.start, "ustar\x0000");
        let (unsigned, _) = sums(&self.0);
        self.text(CHECKSUM.start, &format!("{unsigned:>6o} "));
        self.0
    }
}

/// The sum of all bytes, the checksum field taken as spaces: with bytes unsigned, and signed as some old programs have it.
fn sums(bytes: &[u8; BLOCK_SIZE]) -> (i64, i64) {
    bytes
        .iter()
        .enumerate()
        .fold((0, 0), |(unsigned, signed), (at, &byte)| {
            let byte = if CHECKSUM.contains(&at) { b' ' } else { byte };
            (unsigned + i64::from(byte), signed + i64::from(byte as i8))
        })
}

fn checksum_fits(bytes: &[u8; BLOCK_SIZE]) -> bool {
    let (unsigned, signed) = sums(bytes);
    octal(&bytes[CHECKSUM]).is_some_and(|stored| {
        i64::try_from(stored).is_ok_and(|stored| stored == unsigned || stored == signed)
    })
}

/// A number field: octal text, or big-endian binary where the first bit is set (sizes from 8 GiB on).
fn number(field: &[u8]) -> Option<u64> {
    match field {
        [0x80, rest @ ..] => rest.iter().try_fold(0u64, |value, &byte| {
            Some(value.checked_mul(256)? + u64::from(byte))
        }),
        [0x81..=0xFF, ..] => None,
        _ => octal(field),
    }
}

fn octal(field: &[u8]) -> Option<u64> {
    let is_blank = |byte: &u8| *byte == b' ' || *byte == 0;
    let start = field.iter().position(|byte| !is_blank(byte))?;
    let digits = &field[start..];
    let end = digits.iter().position(is_blank).unwrap_or(digits.len());
    let (digits, rest) = digits.split_at(end);
    if !rest.iter().all(is_blank) {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(number(b"          7 "), Some(7));
        assert_eq!(number(b"00000000010\0"), Some(8));
        assert_eq!(number(b"777777777777"), Some((1 << 36) - 1));
        assert_eq!(number(b"\x80\0\0\0\0\0\0\x02\0\0\0\0"), Some(1 << 33));
        assert_eq!(
            number(b"\x80\xff\0\0\0\0\0\x02\0\0\0\0"),
            None,
            "beyond 64 bits"
        );
        assert_eq!(number(&[0xFF; 12]), None, "negative");
        assert_eq!(number(b"         -1 "), None);
        assert_eq!(number(b"        9   "), None);
        assert_eq!(number(b"      7 7   "), None);
        assert_eq!(number(&[0; 12]), None);
    }

    #[test]
    fn a_signed_checksum_is_accepted() {
        let mut builder = Builder::new("name", 3, b'0');
        builder.0[300] = 0xE4;
        let mut bytes = builder.finish();
        assert_eq!(Block::parse(&bytes).map(|block| block.size), Some(Some(3)));
        let (unsigned, signed) = sums(&bytes);
        assert_eq!(unsigned - signed, 256);
        bytes[CHECKSUM].copy_from_slice(format!("{signed:06o}\0 ").as_bytes());
        assert!(Block::parse(&bytes).is_some());
        bytes[CHECKSUM].copy_from_slice(format!("{:06o}\0 ", signed + 1).as_bytes());
        assert!(Block::parse(&bytes).is_none());
    }
}
