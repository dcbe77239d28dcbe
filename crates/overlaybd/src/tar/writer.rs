//! Wraps a layer into a tar archive while it is written, byte for byte as the reference implementation does.
//!
//! The member's size stands only in the pax header; no time, user or path of the machine gets in.

use std::io::{self, Seek, SeekFrom, Write};

use super::block::Builder;
use super::{padded, BLOCK_SIZE, END_SIZE};
use crate::{Error, Result};

/// Bytes before the layer: pax header, its record, the member's header.
pub const HEAD_SIZE: usize = 3 * BLOCK_SIZE;
const MODE: usize = 100;
const USER_ID: usize = 108;
const GROUP_ID: usize = 116;
const TIME: usize = 136;
const USER: usize = 265;
const GROUP: usize = 297;

/// What precedes a layer of `size` bytes.
#[must_use]
pub fn head(size: u64) -> [u8; HEAD_SIZE] {
    let record = size_record(size);
    let mut member = Builder::new("overlaybd.commit", 0, b'0');
    member.text(MODE, "100644 ");
    member.text(USER_ID, "     0 ");
    member.text(GROUP_ID, "     0 ");
    member.text(TIME, "          0 ");
    member.text(USER, "root");
    member.text(GROUP, "root");
    let pax = Builder::new("overlaybd.pax", record.len() as u64, b'x');
    assemble(pax.finish(), &record, member.finish())
}

/// What follows a layer of `size` bytes: zeros up to a whole block, and the two blocks that end the archive.
#[must_use]
pub fn tail(size: u64) -> Vec<u8> {
    let block = BLOCK_SIZE as u64;
    vec![0; ((block - size % block) % block + END_SIZE) as usize]
}

/// The head of a file that is not finished: no reader takes it for an archive.
fn unfinished_head() -> [u8; HEAD_SIZE] {
    let record = size_record(0);
    let mut pax = [0; BLOCK_SIZE];
    pax.copy_from_slice(&Builder::new("overlaybd.pax", record.len() as u64, b'x').unfinished());
    assemble(
        pax,
        &record,
        Builder::new("overlaybd.new", 0, b'0').unfinished(),
    )
}

fn assemble(pax: [u8; BLOCK_SIZE], record: &str, member: [u8; BLOCK_SIZE]) -> [u8; HEAD_SIZE] {
    let mut head = [0; HEAD_SIZE];
    head[..BLOCK_SIZE].copy_from_slice(&pax);
    head[BLOCK_SIZE..BLOCK_SIZE + record.len()].copy_from_slice(record.as_bytes());
    head[2 * BLOCK_SIZE..].copy_from_slice(&member);
    head
}

/// A pax record states its own length, digits included.
fn size_record(size: u64) -> String {
    let content = format!(" size={size}\n");
    let mut length = content.len();
    while length != content.len() + length.to_string().len() {
        length = content.len() + length.to_string().len();
    }
    format!("{length}{content}")
}

/// A sink for the bytes of a layer that puts the archive around them.
///
/// Dropped before [`Writer::finish`], it leaves a file that no reader takes for a layer.
pub struct Writer<W> {
    sink: W,
    /// Where the archive begins in the sink.
    start: u64,
    position: u64,
    size: u64,
    promised: Option<u64>,
}

impl<W: Write> Writer<W> {
    /// For a sink that cannot go back: the layer must have exactly `size` bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size that no archive can hold; [`Error::Io`].
    pub fn with_size(mut sink: W, size: u64) -> Result<Self> {
        if size == 0
            || size
                .checked_add(HEAD_SIZE as u64 + END_SIZE)
                .and_then(padded)
                .is_none()
        {
            return Err(Error::Invalid(format!(
                "a layer of {size} bytes cannot be wrapped"
            )));
        }
        sink.write_all(&head(size))?;
        Ok(Self {
            sink,
            start: 0,
            position: 0,
            size: 0,
            promised: Some(size),
        })
    }

    /// End an archive whose size was promised. Does not make it durable.
    ///
    /// # Errors
    /// [`Error::Invalid`] if another number of bytes was written; [`Error::Io`].
    pub fn finish_promised(mut self) -> Result<W> {
        if self.promised != Some(self.size) {
            return Err(Error::Invalid(format!(
                "{} bytes were written to a tar member of {} bytes",
                self.size,
                self.promised.unwrap_or_default()
            )));
        }
        self.sink.write_all(&tail(self.size))?;
        self.sink.flush()?;
        Ok(self.sink)
    }
}

impl<W: Write + Seek> Writer<W> {
    /// For a layer of unknown size: the head is written again at the end.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn new(mut sink: W) -> Result<Self> {
        let start = sink.stream_position()?;
        sink.write_all(&unfinished_head())?;
        Ok(Self {
            sink,
            start,
            position: 0,
            size: 0,
            promised: None,
        })
    }

    /// End the archive, the sink standing behind it. Does not make it durable.
    ///
    /// # Errors
    /// [`Error::Invalid`] if nothing was written; [`Error::Io`].
    pub fn finish(mut self) -> Result<W> {
        if self.promised.is_some() {
            return self.finish_promised();
        }
        if self.size == 0 {
            return Err(Error::Invalid(
                "an empty layer cannot be wrapped".to_owned(),
            ));
        }
        let tail = tail(self.size);
        self.seek(SeekFrom::End(0))?;
        self.sink.write_all(&tail)?;
        self.sink.seek(SeekFrom::Start(self.start))?;
        self.sink.write_all(&head(self.size))?;
        let end = self.start + HEAD_SIZE as u64 + self.size + tail.len() as u64;
        self.sink.seek(SeekFrom::Start(end))?;
        self.sink.flush()?;
        Ok(self.sink)
    }
}

impl<W: Write> Write for Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.sink.write(bytes)?;
        self.position += count as u64;
        self.size = self.size.max(self.position);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// Positions are those of the layer, 0 being its first byte.
impl<W: Write + Seek> Seek for Writer<W> {
    fn seek(&mut self, target: SeekFrom) -> io::Result<u64> {
        let position = match target {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::Current(distance) => self.position.checked_add_signed(distance),
            SeekFrom::End(distance) => self.size.checked_add_signed(distance),
        };
        let Some(position) =
            position.filter(|position| self.promised.is_none() && *position <= self.size)
        else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("seek to {target:?} in a tar member of {} bytes", self.size),
            ));
        };
        self.sink
            .seek(SeekFrom::Start(self.start + HEAD_SIZE as u64 + position))?;
        self.position = position;
        Ok(position)
    }
}
