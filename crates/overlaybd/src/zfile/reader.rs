//! Reads the plain bytes of a ZFile at any offset, from any number of threads.
//!
//! Decompressed blocks are kept only as far as the next small read needs them: caching is the business of whoever reads.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::codec::Decoder;
use super::header::{has_magic, Header, HEADER_SIZE};
use super::table::Table;
use crate::io::ReadAt;
use crate::{Error, Result};

/// Most compressed bytes that are fetched at once. At least one block is.
const FETCH_SIZE: usize = 256 << 10;
/// Plain bytes that are kept per file, in at least [`MIN_KEPT`] blocks.
const KEPT_SIZE: usize = 128 << 10;
const MIN_KEPT: usize = 4;
const MAX_KEPT: usize = 32;
/// Buffers and contexts kept for the next reads: as many as are likely to read one file at the same time.
const MAX_IDLE: usize = 4;
/// Size up to which a buffer is kept.
const MAX_IDLE_BUFFER: usize = 64 << 10;

/// A ZFile, seen as its plain bytes.
pub struct ZFile {
    source: Arc<dyn ReadAt>,
    header: Header,
    table: Table,
    /// Block `b` can only be in slot `b % slots`, so that neighbours do not push each other out.
    kept: Box<[Mutex<Option<Kept>>]>,
    idle: Mutex<Vec<Scratch>>,
}

struct Kept {
    block: u64,
    plain: Box<[u8]>,
}

#[derive(Default)]
struct Scratch {
    stored: Vec<u8>,
    decoder: Decoder,
}

/// Whether the source begins like a ZFile. One that does and is damaged is still meant to be one.
///
/// # Errors
/// [`Error::Io`].
pub fn is_zfile(source: &dyn ReadAt) -> Result<bool> {
    if source.len()? < HEADER_SIZE as u64 {
        return Ok(false);
    }
    Ok(has_magic(&read_header(source, 0)?))
}

impl ZFile {
    /// Read header, trailer if the header is not final, and table.
    ///
    /// # Errors
    /// [`Error::Format`] if anything in them contradicts itself, a digest, or the length of the source;
    /// [`Error::Unsupported`] for dictionaries, compressed tables and other algorithms; [`Error::Limit`] for more than
    /// [`super::MAX_BLOCKS`] blocks or blocks above [`super::MAX_BLOCK_SIZE`]; [`Error::Io`].
    pub fn open(source: Arc<dyn ReadAt>) -> Result<Self> {
        let length = source.len()?;
        if length < 2 * HEADER_SIZE as u64 {
            return Err(Error::Format(format!(
                "zfile of {length} bytes has no room for header and trailer"
            )));
        }
        let (header, is_final) = Header::decode_header(&read_header(&*source, 0)?)?;
        let header = if is_final {
            header
        } else {
            Header::decode_trailer(&read_header(&*source, length - HEADER_SIZE as u64)?)?
        };
        header.check(length)?;
        let table = Table::read(&*source, &header)?;
        let slots = (KEPT_SIZE / header.block_size as usize).clamp(MIN_KEPT, MAX_KEPT);
        Ok(Self {
            source,
            header,
            table,
            kept: (0..slots).map(|_| Mutex::new(None)).collect(),
            idle: Mutex::new(Vec::new()),
        })
    }

    /// The fields that the file is read by: the header's if they are final, else the trailer's.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Check what reading does not need: that the trailer is whole and agrees with the header, and every block.
    ///
    /// # Errors
    /// [`Error::Format`] for the first thing that is wrong; [`Error::Io`].
    pub fn verify(&self) -> Result<()> {
        let length = self.source.len()?;
        let trailer =
            Header::decode_trailer(&read_header(&*self.source, length - HEADER_SIZE as u64)?)?;
        if trailer != self.header {
            return Err(Error::Format(
                "zfile: header and trailer do not agree".to_owned(),
            ));
        }
        let end = self.header.index_offset + self.header.blocks * 4 + HEADER_SIZE as u64;
        if end != length {
            return Err(Error::Format(format!(
                "zfile: {} bytes between table and trailer",
                length - end
            )));
        }
        let mut plain = vec![0; FETCH_SIZE];
        let mut offset = 0;
        while offset < self.header.original_size {
            let count = (self.header.original_size - offset).min(FETCH_SIZE as u64);
            self.read_exact_at(&mut plain[..count as usize], offset)?;
            offset += count;
        }
        Ok(())
    }

    /// Fill the buffer; `false` as soon as `fetch`, which fills a buffer from an offset of the source, says so.
    fn read(
        &self,
        buffer: &mut [u8],
        offset: u64,
        fetch: impl Fn(&mut [u8], u64) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let end = offset.checked_add(buffer.len() as u64);
        let Some(end) = end.filter(|end| *end <= self.header.original_size) else {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "{} bytes at {offset} of {} plain bytes",
                    buffer.len(),
                    self.header.original_size
                ),
            ));
        };
        let size = u64::from(self.header.block_size);
        let mut request = Request {
            rest: buffer,
            skip: (offset % size) as usize,
        };
        let mut block = offset / size;
        let behind = end.div_ceil(size);
        let mut scratch = None;
        while !request.rest.is_empty() {
            if self.copy_kept(block, &mut request) {
                block += 1;
                continue;
            }
            let scratch = scratch.get_or_insert_with(|| self.take_scratch());
            let Scratch { stored, decoder } = scratch;
            let run = self.run(block, behind);
            let start = self.table.place(block).start;
            stored.resize((self.table.place(run.end - 1).end - start) as usize, 0);
            if !fetch(stored, start)? {
                return Ok(false);
            }
            let mut stored = stored.as_slice();
            for each in run {
                let (this, after) = stored.split_at(self.table.size(each));
                self.decode(each, this, decoder, &mut request)
                    .map_err(|reason| {
                        io::Error::new(
                            io::ErrorKind::InvalidData,
                            format!("zfile block {each}: {reason}"),
                        )
                    })?;
                stored = after;
                block = each + 1;
            }
        }
        if let Some(scratch) = scratch {
            self.give_back(scratch);
        }
        Ok(true)
    }

    /// The blocks from `block` on, but none from `behind` on, that are fetched at once.
    fn run(&self, block: u64, behind: u64) -> Range<u64> {
        let mut total = self.table.size(block);
        let mut end = block + 1;
        while end < behind {
            total += self.table.size(end);
            if total > FETCH_SIZE {
                break;
            }
            end += 1;
        }
        block..end
    }

    /// Decompress a block into the request: in place if all of it is wanted, else by way of a copy that is kept.
    fn decode(
        &self,
        block: u64,
        stored: &[u8],
        decoder: &mut Decoder,
        request: &mut Request,
    ) -> std::result::Result<(), String> {
        let (algorithm, verify) = (self.header.algorithm, self.header.verify);
        let length = self.header.plain_length(block) as usize;
        if request.skip == 0 && request.rest.len() >= length {
            return decoder.decode(algorithm, verify, stored, request.take(length));
        }
        let mut plain = vec![0; length].into_boxed_slice();
        decoder.decode(algorithm, verify, stored, &mut plain)?;
        request.copy_from(&plain);
        *lock(self.slot(block)) = Some(Kept { block, plain });
        Ok(())
    }

    fn copy_kept(&self, block: u64, request: &mut Request) -> bool {
        match &*lock(self.slot(block)) {
            Some(kept) if kept.block == block => {
                request.copy_from(&kept.plain);
                true
            }
            _ => false,
        }
    }

    fn slot(&self, block: u64) -> &Mutex<Option<Kept>> {
        &self.kept[block as usize % self.kept.len()]
    }

    fn take_scratch(&self) -> Scratch {
        lock(&self.idle).pop().unwrap_or_default()
    }

    fn give_back(&self, scratch: Scratch) {
        let mut idle = lock(&self.idle);
        if idle.len() < MAX_IDLE && scratch.stored.capacity() <= MAX_IDLE_BUFFER {
            idle.push(scratch);
        }
    }
}

/// What is left of a read: bytes to fill, and how many of the next block come before them.
struct Request<'a> {
    rest: &'a mut [u8],
    skip: usize,
}

impl<'a> Request<'a> {
    fn take(&mut self, count: usize) -> &'a mut [u8] {
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(count);
        self.rest = rest;
        taken
    }

    fn copy_from(&mut self, plain: &[u8]) {
        let wanted = &plain[self.skip..];
        let count = wanted.len().min(self.rest.len());
        self.take(count).copy_from_slice(&wanted[..count]);
        self.skip = 0;
    }
}

impl ReadAt for ZFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read(buffer, offset, |stored, at| {
            self.source.read_exact_at(stored, at).map(|()| true)
        })?;
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.header.original_size)
    }

    fn try_read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        self.read(buffer, offset, |stored, at| {
            self.source.try_read_exact_at(stored, at)
        })
    }
}

/// Kept blocks and buffers are whole between any two statements, so a panic elsewhere leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read_header(source: &dyn ReadAt, offset: u64) -> Result<[u8; HEADER_SIZE]> {
    let mut bytes = [0; HEADER_SIZE];
    source.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}
