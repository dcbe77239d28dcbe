//! ZFile against its vector and its invariants: round trips, old files, threads, sinks that fail.

mod wrap_support;

use std::io::{self, Write};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use overlaybd::io::ReadAt;
use overlaybd::zfile::{is_zfile, Algorithm, Options, Writer, ZFile};
use overlaybd::Error;
use proptest::prelude::*;

use wrap_support::{
    content, patch_zfile, read_all, sha256, tarred, u32_at, u64_at, zfile, Content, Memory,
};

const HEADER: usize = 512;

fn options(algorithm: Algorithm, block_size: u32) -> Options {
    Options {
        algorithm,
        block_size,
        ..Options::default()
    }
}

fn open(bytes: impl Into<Vec<u8>>) -> overlaybd::Result<ZFile> {
    ZFile::open(Memory::shared(bytes))
}

/// Open and read everything.
fn plain_of(bytes: impl Into<Vec<u8>>) -> overlaybd::Result<Vec<u8>> {
    Ok(read_all(&open(bytes)?)?)
}

/// The vector of the format: 4096 zero bytes as the reference compressor stores them.
fn vector(final_header: bool) -> Vec<u8> {
    let mut block = vec![0x1F, 0x00, 0x01, 0x00];
    block.extend([0xFF; 15]);
    block.extend([0xF6, 0x50, 0, 0, 0, 0, 0]);
    let mut header = vec![0; HEADER];
    header[..24].copy_from_slice(b"ZFile\0\x01\0tuji.yyf@Alibaba");
    header[24] = 96;
    header[73] = 0x10;
    header[76] = 1;
    header[88] = 1;
    let mut first = header.clone();
    patch_zfile(&mut first, 32, &[0x13]);
    assert_eq!(first[28..32], [0xFC, 0x12, 0xA2, 0xC7]);
    header[40..48].copy_from_slice(&[0x1E, 0x02, 0, 0, 0, 0, 0, 0]);
    header[48] = 1;
    header[57] = 0x10;
    header[64..68].copy_from_slice(&0xDB65_C0A9_u32.to_le_bytes());
    let mut last = header.clone();
    patch_zfile(&mut last, 32, &[0x1B]);
    assert_eq!(last[28..32], [0x4D, 0x37, 0x96, 0x70]);
    let mut trailer = header;
    patch_zfile(&mut trailer, 32, &[0x16]);
    assert_eq!(trailer[28..32], [0x69, 0xE2, 0x56, 0x80]);
    let mut file = if final_header { last } else { first };
    file.extend(&block);
    file.extend([0x24, 0x17, 0x91, 0xB4]);
    file.extend([0x1E, 0, 0, 0]);
    file.extend(trailer);
    file
}

#[test]
fn the_vector_is_read() {
    let forward = vector(false);
    assert_eq!(forward.len(), 1058);
    assert_eq!(
        sha256(&forward),
        "1dc3a5284c0e958a5c6fdf71167f44787edc0e89f54f84e03c5d8ea9ecb052dc"
    );
    let overwritten = vector(true);
    assert_eq!(
        sha256(&overwritten),
        "714f75f207064cfb072be39ae14dd3b1df31a76bd057afe3014a8a47350e3c45"
    );
    assert_eq!(tarred(&overwritten).len(), 4096);
    for file in [forward, overwritten] {
        let opened = open(file).expect("open");
        opened.verify().expect("verify");
        assert_eq!(read_all(&opened).expect("read"), vec![0; 4096]);
    }
}

/// Compressors differ in how they store a run, so all but the block, and what depends on its length, must be the same.
#[test]
fn the_vector_is_written_but_for_the_compressors_choice() {
    for final_header in [false, true] {
        let ours = zfile(&[0; 4096], Options::default(), final_header);
        let theirs = vector(final_header);
        for (our_start, their_start) in [(0, 0), (ours.len() - HEADER, theirs.len() - HEADER)] {
            let mut ours = ours[our_start..our_start + HEADER].to_vec();
            let theirs = &theirs[their_start..their_start + HEADER];
            if our_start > 0 || final_header {
                ours[40..48].copy_from_slice(&theirs[40..48]);
                patch_zfile(&mut ours, 64, &theirs[64..68]);
            }
            assert_eq!(ours, theirs);
        }
    }
}

fn algorithms() -> impl Strategy<Value = Algorithm> {
    prop_oneof![Just(Algorithm::Lz4), Just(Algorithm::Zstd)]
}

fn contents() -> impl Strategy<Value = Content> {
    prop_oneof![
        Just(Content::Zeros),
        Just(Content::Text),
        Just(Content::Noise),
        Just(Content::Mixed)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn random_reads_of_what_was_written(
        algorithm in algorithms(),
        kind in contents(),
        block_shift in 12u32..=15,
        blocks in 0usize..20,
        odd in prop_oneof![Just(0usize), Just(1), Just(usize::MAX), 0usize..4096],
        verify: bool,
        threads in 1usize..=3,
        final_header: bool,
        seed: u64,
        writes in prop::collection::vec(1usize..70_000, 1..8),
        reads in prop::collection::vec((0usize..400_000, 0usize..100_000), 1..24),
    ) {
        let block_size = 1u32 << block_shift;
        let odd = if odd == usize::MAX { block_size as usize - 1 } else { odd };
        let size = (blocks * block_size as usize + odd).max(1);
        let plain = content(kind, seed, size);
        let mut writer = Writer::new(io::Cursor::new(Vec::new()), Options { algorithm, block_size, verify, threads })?;
        let mut rest = plain.as_slice();
        for length in writes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at(rest.len().min(*length));
            writer.write_all(now)?;
            rest = later;
        }
        let (sink, summary) = if final_header { writer.finish_with_header()? } else { writer.finish()? };
        prop_assert_eq!(sink.position(), summary.stored_size);
        let file = sink.into_inner();

        let source = Memory::shared(file.clone());
        prop_assert!(is_zfile(&*source)?);
        let opened = ZFile::open(source)?;
        let header = opened.header().clone();
        prop_assert_eq!((header.algorithm, header.block_size, header.verify), (algorithm, block_size, verify));
        let table = &file[header.index_offset as usize..file.len() - HEADER];
        let sum: u64 = table.chunks(4).map(|entry| u64::from(u32_at(entry, 0))).sum();
        prop_assert_eq!(sum, header.index_offset - 512);
        prop_assert_eq!(table.len() as u64, header.blocks * 4);
        opened.verify()?;
        for (offset, length) in reads {
            let offset = offset % (size + 1);
            let length = length.min(size - offset);
            let mut buffer = vec![0xEE; length];
            opened.read_exact_at(&mut buffer, offset as u64)?;
            prop_assert!(buffer == plain[offset..offset + length], "{} bytes at {}", length, offset);
        }
        let error = opened.read_exact_at(&mut [0; 2], size as u64 - 1).unwrap_err();
        prop_assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        prop_assert_eq!(
            opened.read_exact_at(&mut [0; 2], u64::MAX).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    /// Nothing but the fields that are needed counts, so everything else may be what memory held.
    #[test]
    fn old_files_with_garbage_are_read(
        algorithm in algorithms(),
        final_header: bool,
        garbage in prop::collection::vec(any::<u8>(), HEADER * 2),
    ) {
        let plain = content(Content::Mixed, 5, 30_001);
        let mut file = zfile(&plain, options(algorithm, 4096), final_header);
        let trailer = file.len() - HEADER;
        for (start, needed) in [(0, if final_header { 0b1000 } else { 0 } | 1), (trailer, 0b110)] {
            let noise = &garbage[if start == 0 { 0 } else { HEADER }..][..HEADER];
            let header = &mut file[start..start + HEADER];
            let known_flags: u64 = 0b01_1111;
            let flags = (u64_at(noise, 32) & !known_flags) | needed | (u64_at(noise, 32) & if start == 0 { 0b110 } else { 0 });
            header[32..40].copy_from_slice(&flags.to_le_bytes());
            for unused in [24..32, 64..72, 77..78, 79..84, 89..HEADER] {
                header[unused.clone()].copy_from_slice(&noise[unused]);
            }
        }
        prop_assert!(plain_of(file)? == plain);
    }
}

#[test]
fn garbage_may_claim_that_an_unfinished_header_is_final() {
    let mut file = zfile(b"plain bytes", Options::default(), false);
    let trailer = file.len() - HEADER;
    file[32] = 0b1111;
    file[28..32].fill(1);
    file[trailer + 32] = 0b110;
    file[trailer + 28..trailer + 32].fill(2);
    assert_eq!(plain_of(file).expect("read by its trailer"), b"plain bytes");
}

#[test]
fn blocks_that_grow_are_read() {
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        for block_size in [4096, 32768] {
            let plain = content(Content::Noise, 3, 3 * block_size as usize);
            let file = zfile(&plain, options(algorithm, block_size), true);
            assert!(file.len() > plain.len() + 2 * HEADER);
            assert!(plain_of(file).expect("read") == plain);
        }
    }
}

#[test]
fn small_sequential_reads_decompress_once() {
    for (block_size, shift) in [(4096, 512), (4096, 0), (32768, 512), (32768, 0)] {
        let plain = content(Content::Mixed, 1, 512 << 10);
        let source = Memory::shared(zfile(&plain, options(Algorithm::Lz4, block_size), true));
        let opened = ZFile::open(source.clone()).expect("open");
        let blocks = opened.header().index_offset - 512;
        source.fetched.store(0, Ordering::Relaxed);
        let mut buffer = [0; 4096];
        let mut offset = shift;
        opened.read_exact_at(&mut buffer[..shift], 0).expect("read");
        while offset < plain.len() {
            let count = buffer.len().min(plain.len() - offset);
            opened
                .read_exact_at(&mut buffer[..count], offset as u64)
                .expect("read");
            assert!(buffer[..count] == plain[offset..offset + count]);
            offset += count;
        }
        assert_eq!(
            source.fetched.load(Ordering::Relaxed),
            blocks,
            "each block once"
        );
    }
}

#[test]
fn many_threads_read_the_same_file() {
    let plain = content(Content::Mixed, 11, 300_000);
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        let opened = open(zfile(&plain, options(algorithm, 4096), true)).expect("open");
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let (opened, plain) = (&opened, &plain);
                scope.spawn(move || {
                    let mut buffer = vec![0; 9000];
                    for step in 0..400u64 {
                        let offset = ((thread + 1) * 7919 * (step + 3) * 512) as usize
                            % (plain.len() - buffer.len());
                        opened
                            .read_exact_at(&mut buffer, offset as u64)
                            .expect("read");
                        assert!(buffer == plain[offset..offset + buffer.len()]);
                    }
                });
            }
        });
    }
}

/// A source of which nothing is in the page cache.
struct Slow(Memory);

impl ReadAt for Slow {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
}

#[test]
fn reads_that_must_not_wait() {
    let plain = content(Content::Text, 1, 50_000);
    let bytes = zfile(&plain, Options::default(), true);
    let slow = ZFile::open(Arc::new(Slow(Memory {
        bytes: bytes.clone(),
        ..Memory::default()
    })))
    .expect("open");
    let mut buffer = [0; 1000];
    assert!(!slow.try_read_exact_at(&mut buffer, 100).expect("try"));
    slow.read_exact_at(&mut buffer[..10], 0).expect("read");
    assert!(
        slow.try_read_exact_at(&mut buffer, 100).expect("try"),
        "the block was kept"
    );
    assert!(buffer == plain[100..1100]);

    let mut file = tempfile::tempfile().expect("file");
    file.write_all(&bytes).expect("write");
    let quick = ZFile::open(Arc::new(file)).expect("open");
    let mut all = vec![0; plain.len()];
    // Where the file system cannot tell, the answer may be no.
    if quick.try_read_exact_at(&mut all, 0).expect("try") {
        assert!(all == plain);
    }
}

/// A sink that is full after some bytes.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.checked_sub(bytes.len()) {
            Some(left) => {
                self.0 = left;
                Ok(bytes.len())
            }
            None => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_sink_is_out_of_space_and_the_writer_stays_failed() {
    let plain = content(Content::Noise, 1, 3 << 20);
    let mut writer = Writer::new(Full(1000), Options::default()).expect("writer");
    let error = writer.write_all(&plain).expect_err("there is no room");
    assert!(Error::Io(error).is_out_of_space());
    assert!(matches!(writer.write(&[0]), Err(error) if error.kind() == io::ErrorKind::Other));
    assert!(matches!(writer.finish(), Err(Error::Invalid(_))));
    assert!(
        matches!(Writer::new(Full(100), Options::default()), Err(error) if error.is_out_of_space())
    );
}

#[test]
fn what_cannot_be_written_is_refused() {
    let new = |options| Writer::new(Vec::new(), options).map(|_| ());
    for block_size in [0, 1, 2048, 4097, 65536] {
        assert!(
            matches!(
                new(options(Algorithm::Lz4, block_size)),
                Err(Error::Invalid(_))
            ),
            "{block_size}"
        );
    }
    for threads in [0, 17] {
        assert!(matches!(
            new(Options {
                threads,
                ..Options::default()
            }),
            Err(Error::Invalid(_))
        ));
    }
    let empty = Writer::new(Vec::new(), Options::default()).expect("writer");
    assert!(matches!(empty.finish(), Err(Error::Invalid(_))));
}

#[test]
fn a_writer_that_starts_in_the_middle_of_its_sink() {
    let mut sink = io::Cursor::new(Vec::new());
    sink.write_all(b"before").expect("write");
    let mut writer = Writer::new(sink, Options::default()).expect("writer");
    writer.write_all(b"plain bytes").expect("write");
    let (sink, summary) = writer.finish_with_header().expect("finish");
    let bytes = sink.into_inner();
    assert_eq!(bytes.len() as u64, 6 + summary.stored_size);
    assert_eq!(plain_of(&bytes[6..]).expect("read"), b"plain bytes");
}
