//! A sink for plain bytes that writes a ZFile, in one pass.
//!
//! Decides nothing about durability; writes to its sink in order, except for the last step of [`Writer::finish_with_header`].

use std::io::{self, Seek, SeekFrom, Write};

use super::codec::Encoder;
use super::header::{Header, Part, HEADER_SIZE};
use super::{
    Algorithm, DEFAULT_BLOCK_SIZE, MAX_BLOCKS, MAX_WRITTEN_BLOCK_SIZE, MIN_WRITTEN_BLOCK_SIZE,
};
use crate::{checksum, Error, Result};

/// Plain bytes that each thread compresses at a time: long enough that starting it costs nothing against its work.
const PIECE: usize = 512 << 10;
/// Most threads that a writer uses, which bounds its memory to some 32 MiB.
const MAX_THREADS: usize = 16;

/// How a ZFile is written. The default is what both known readers expect: LZ4, blocks of 4 KiB, with checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    pub algorithm: Algorithm,
    /// Plain bytes per block: a power of two from [`MIN_WRITTEN_BLOCK_SIZE`] to [`MAX_WRITTEN_BLOCK_SIZE`].
    pub block_size: u32,
    /// Whether a checksum follows each block.
    pub verify: bool,
    /// Threads that compress, 1 to 16; with 1 the caller's own does.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Lz4,
            block_size: DEFAULT_BLOCK_SIZE,
            verify: true,
            threads: 1,
        }
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Bytes that came in.
    pub original_size: u64,
    /// Bytes of the ZFile.
    pub stored_size: u64,
}

/// Plain bytes in, ZFile out. Dropped unfinished, it leaves a file that no reader accepts.
pub struct Writer<W> {
    sink: W,
    header: Header,
    /// Plain bytes that are not compressed yet.
    pending: Vec<u8>,
    /// Plain bytes at which they are.
    batch: usize,
    sizes: Vec<u32>,
    workers: Vec<Worker>,
    /// A write failed, so that what is in the sink is unknown.
    failed: bool,
}

struct Worker {
    encoder: Encoder,
    stored: Vec<u8>,
    sizes: Vec<u32>,
}

impl Worker {
    fn run(&mut self, plain: &[u8], block_size: usize) -> Result<()> {
        self.stored.clear();
        self.sizes.clear();
        for block in plain.chunks(block_size) {
            self.sizes
                .push(self.encoder.append(block, &mut self.stored)?);
        }
        Ok(())
    }
}

impl<W: Write> Writer<W> {
    /// Writes the first header at once.
    ///
    /// # Errors
    /// [`Error::Invalid`] for options out of range; [`Error::Io`].
    pub fn new(mut sink: W, options: Options) -> Result<Self> {
        let Options {
            algorithm,
            block_size,
            verify,
            threads,
        } = options;
        if !block_size.is_power_of_two()
            || !(MIN_WRITTEN_BLOCK_SIZE..=MAX_WRITTEN_BLOCK_SIZE).contains(&block_size)
        {
            return Err(Error::Invalid(format!(
                "block size {block_size} of a zfile: it must be a power of two from {MIN_WRITTEN_BLOCK_SIZE} to \
                 {MAX_WRITTEN_BLOCK_SIZE}"
            )));
        }
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(Error::Invalid(format!(
                "{threads} compressing threads: 1 to {MAX_THREADS} are possible"
            )));
        }
        let header = Header {
            index_offset: 0,
            blocks: 0,
            original_size: 0,
            index_crc: 0,
            block_size,
            algorithm,
            verify,
            digest: true,
        };
        let workers = (0..threads)
            .map(|_| {
                Ok(Worker {
                    encoder: Encoder::new(algorithm, verify)?,
                    stored: Vec::new(),
                    sizes: Vec::new(),
                })
            })
            .collect::<Result<_>>()?;
        sink.write_all(&header.encode(Part::FirstHeader))?;
        let header = Header {
            index_offset: HEADER_SIZE as u64,
            ..header
        };
        let batch = threads * PIECE;
        Ok(Self {
            sink,
            header,
            pending: Vec::with_capacity(batch),
            batch,
            sizes: Vec::new(),
            workers,
            failed: false,
        })
    }

    /// End the file with table and trailer, for sinks that only go forward: readers then start at the trailer.
    /// Does not make it durable.
    ///
    /// # Errors
    /// [`Error::Invalid`] if nothing was written, or after a failed write; [`Error::Limit`] for more than
    /// [`MAX_BLOCKS`] blocks; [`Error::Io`].
    pub fn finish(mut self) -> Result<(W, Summary)> {
        self.end()?;
        self.sink.flush()?;
        let summary = self.summary();
        Ok((self.sink, summary))
    }

    fn end(&mut self) -> Result<()> {
        self.compress_pending()?;
        if self.header.original_size == 0 {
            return Err(Error::Invalid(
                "a zfile of no bytes, which readers refuse".to_owned(),
            ));
        }
        let mut chunk = Vec::new();
        for sizes in self.sizes.chunks(64 << 10) {
            chunk.clear();
            chunk.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
            self.header.index_crc = checksum::raw(self.header.index_crc, &chunk);
            self.sink.write_all(&chunk)?;
        }
        self.sink.write_all(&self.header.encode(Part::Trailer))?;
        Ok(())
    }

    fn summary(&self) -> Summary {
        Summary {
            original_size: self.header.original_size,
            stored_size: self.header.index_offset + self.header.blocks * 4 + HEADER_SIZE as u64,
        }
    }

    fn compress_pending(&mut self) -> Result<()> {
        if self.failed {
            return Err(Error::Invalid(
                "a write to this zfile failed before".to_owned(),
            ));
        }
        // Stays set when anything below returns early.
        self.failed = true;
        let block_size = self.header.block_size as usize;
        let new_blocks = self.pending.len().div_ceil(block_size) as u64;
        if self.header.blocks + new_blocks > MAX_BLOCKS {
            return Err(Error::Limit(format!(
                "a zfile has at most {MAX_BLOCKS} blocks"
            )));
        }
        let pieces: Vec<&[u8]> = self.pending.chunks(PIECE).collect();
        let used = pieces.len();
        match (&mut self.workers[..used], pieces.as_slice()) {
            ([worker], [piece]) => worker.run(piece, block_size)?,
            (workers, pieces) => std::thread::scope(|scope| {
                let running: Vec<_> = workers
                    .iter_mut()
                    .zip(pieces)
                    .map(|(worker, piece)| scope.spawn(|| worker.run(piece, block_size)))
                    .collect();
                running.into_iter().try_for_each(|thread| {
                    thread
                        .join()
                        .map_err(|_| Error::Invalid("a compressing thread panicked".to_owned()))?
                })
            })?,
        }
        for worker in &self.workers[..used] {
            self.sink.write_all(&worker.stored)?;
            self.sizes.extend_from_slice(&worker.sizes);
            self.header.index_offset += worker.stored.len() as u64;
        }
        self.header.blocks += new_blocks;
        self.header.original_size += self.pending.len() as u64;
        self.pending.clear();
        self.failed = false;
        Ok(())
    }
}

impl<W: Write + Seek> Writer<W> {
    /// End the file like [`Writer::finish`], then write the final fields over the first header, so that readers need no
    /// trailer. The sink is left standing behind the file.
    ///
    /// # Errors
    /// As [`Writer::finish`].
    pub fn finish_with_header(mut self) -> Result<(W, Summary)> {
        self.end()?;
        let summary = self.summary();
        let end = self.sink.stream_position()?;
        self.sink.seek(SeekFrom::Start(end - summary.stored_size))?;
        self.sink
            .write_all(&self.header.encode(Part::FinalHeader))?;
        self.sink.seek(SeekFrom::Start(end))?;
        self.sink.flush()?;
        Ok((self.sink, summary))
    }
}

impl<W: Write> Write for Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.pending.len() == self.batch {
            self.compress_pending().map_err(|error| match error {
                Error::Io(error) => error,
                other => io::Error::other(other),
            })?;
        }
        let count = bytes.len().min(self.batch - self.pending.len());
        self.pending.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    /// Nothing goes out before a batch is full: blocks cannot be cut short in the middle of a file.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
