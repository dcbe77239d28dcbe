//! Finds the layer inside a tar archive and shows its bytes as a source of their own.
//!
//! Reads headers only; whatever follows the first regular member is not looked at.

use std::io;
use std::sync::Arc;

use super::block::{Block, Kind};
use super::{padded, BLOCK_SIZE, END_SIZE};
use crate::io::ReadAt;
use crate::{Error, Result};

/// Headers before the layer: a pax header and long names are two or three, more is an attack or not one of our files.
const MAX_HEADERS: usize = 16;
/// Largest pax header that is read, in bytes.
const MAX_PAX: u64 = 64 << 10;

/// The bytes of the archive's first regular member.
pub struct Member {
    source: Arc<dyn ReadAt>,
    offset: u64,
    size: u64,
}

impl Member {
    /// Where the member's bytes begin in the archive.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the member in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    fn position(&self, offset: u64, length: usize) -> io::Result<u64> {
        match offset.checked_add(length as u64) {
            Some(end) if end <= self.size => Ok(self.offset + offset),
            _ => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "{length} bytes at {offset} of a tar member of {} bytes",
                    self.size
                ),
            )),
        }
    }
}

impl ReadAt for Member {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.source
            .read_exact_at(buffer, self.position(offset, buffer.len())?)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn try_read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        self.source
            .try_read_exact_at(buffer, self.position(offset, buffer.len())?)
    }
}

/// The layer inside, or `None` if the source is no tar archive.
///
/// # Errors
/// [`Error::Format`] if it is one, but its first member is not a regular file, has a size that cannot be, or the archive ends
/// before its end; [`Error::Limit`] if more headers precede the member than any writer makes; [`Error::Io`].
pub fn open(source: &Arc<dyn ReadAt>) -> Result<Option<Member>> {
    let length = source.len()?;
    if length < BLOCK_SIZE as u64 {
        return Ok(None);
    }
    let Some(mut block) = read_block(&**source, 0)? else {
        return Ok(None);
    };
    let mut offset = 0;
    let mut size_of_next = None;
    for _ in 0..MAX_HEADERS {
        let body = offset + BLOCK_SIZE as u64;
        let size = match (block.kind, block.size) {
            (Kind::Regular, size) => {
                let size = size_of_next.or(size).ok_or_else(|| bad_size(offset))?;
                let end = body
                    .checked_add(size)
                    .and_then(padded)
                    .and_then(|end| end.checked_add(END_SIZE));
                if end.is_none_or(|end| end > length) {
                    return Err(Error::Format(format!(
                        "tar: a member of {size} bytes at {body} does not fit in {length} bytes"
                    )));
                }
                return Ok(Some(Member {
                    source: Arc::clone(source),
                    offset: body,
                    size,
                }));
            }
            (Kind::Other(kind), _) => {
                return Err(Error::Format(format!(
                    "tar: the first member has type {kind:#04x}, not a regular file"
                )))
            }
            (_, None) => return Err(bad_size(offset)),
            (_, Some(size)) => size,
        };
        let next = body.checked_add(size).and_then(padded);
        let next = next.filter(|next| {
            next.checked_add(BLOCK_SIZE as u64)
                .is_some_and(|end| end <= length)
        });
        let Some(next) = next else {
            return Err(Error::Format(format!(
                "tar: nothing follows the header at {offset}"
            )));
        };
        if block.kind == Kind::Pax {
            if size > MAX_PAX {
                return Err(Error::Limit(format!(
                    "tar: pax header of {size} bytes, at most {MAX_PAX} are read"
                )));
            }
            let mut records = vec![0; size as usize];
            source.read_exact_at(&mut records, body)?;
            size_of_next = pax_size(&records)?.or(size_of_next);
        }
        offset = next;
        block = read_block(&**source, offset)?.ok_or_else(|| {
            Error::Format(format!("tar: no header at {offset}, where one must be"))
        })?;
    }
    Err(Error::Limit(format!(
        "tar: more than {MAX_HEADERS} headers before the first file"
    )))
}

fn read_block(source: &dyn ReadAt, offset: u64) -> Result<Option<Block>> {
    let mut bytes = [0; BLOCK_SIZE];
    source.read_exact_at(&mut bytes, offset)?;
    Ok(Block::parse(&bytes))
}

fn bad_size(offset: u64) -> Error {
    Error::Format(format!("tar: the header at {offset} has no valid size"))
}

/// The last `size` record, if it is above 0: a member without a size takes the one of its own header.
fn pax_size(mut records: &[u8]) -> Result<Option<u64>> {
    let mut size = None;
    while !records.is_empty() {
        let (record, rest) = split_record(records)
            .ok_or_else(|| Error::Format("tar: pax records do not parse".to_owned()))?;
        if let Some(value) = record.strip_prefix(b"size=") {
            let value = decimal(value).ok_or_else(|| {
                Error::Format("tar: pax size is not a number of bytes".to_owned())
            })?;
            size = Some(value).filter(|size| *size > 0);
        }
        records = rest;
    }
    Ok(size)
}

/// The first `"<length> <key>=<value>\n"` as `key=value`, and the bytes behind it.
fn split_record(records: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = records.iter().take(20).position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(&records[..space])?).ok()?;
    if length <= space || length > records.len() {
        return None;
    }
    let (record, rest) = records.split_at(length);
    let record = record[space + 1..].strip_suffix(b"\n")?;
    record.contains(&b'=').then_some((record, rest))
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pax_records() {
        let size = |records: &[u8]| pax_size(records).ok();
        assert_eq!(size(b"15 size=639491\n"), Some(Some(639_491)));
        assert_eq!(
            size(b"10 path=a\n15 size=639491\n8 a=bcd\n"),
            Some(Some(639_491))
        );
        assert_eq!(
            size(b"10 size=5\n10 size=6\n"),
            Some(Some(6)),
            "the last one counts"
        );
        assert_eq!(size(b"10 size=0\n"), Some(None));
        assert_eq!(size(b""), Some(None));
        for bad in [
            &b"0 size=5\n"[..],
            b"1 ",
            b"2 \n",
            b"10 size=5",
            b"99 size=5\n",
            b"18446744073709551616 size=5\n",
            b"-9 size=5\n",
            b"11 size=-5\n",
            b"28 size=18446744073709551616\n",
            b"10 size=\x35\n\0",
            b"10 nothing\n",
        ] {
            assert_eq!(size(bad), None, "{}", String::from_utf8_lossy(bad));
        }
    }
}
