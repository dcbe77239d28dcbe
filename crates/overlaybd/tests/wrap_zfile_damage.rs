//! Damaged ZFiles: every bit flipped, cut at every length, and contradictions whose checksums are right.

mod wrap_support;

use std::io;

use overlaybd::io::ReadAt;
use overlaybd::zfile::{Algorithm, Options, ZFile};
use overlaybd::{checksum, Error};

use wrap_support::{content, patch_zfile, read_all, u32_at, u64_at, zfile, Content, Memory};

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

/// Each flipped bit of header, blocks and table makes opening or reading fail, each of the trailer the verification; and no
/// read ever gives other bytes.
#[test]
fn every_flipped_bit_is_detected() {
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        for final_header in [false, true] {
            let plain = content(Content::Text, 7, 4096 + 300);
            let file = zfile(&plain, options(algorithm, 4096), final_header);
            let trailer = file.len() - HEADER;
            for bit in 0..file.len() * 8 {
                let mut damaged = file.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                let verified = open(damaged.clone()).and_then(|opened| opened.verify());
                assert!(
                    verified.is_err(),
                    "bit {bit} of {algorithm:?} passes the verification"
                );
                match plain_of(damaged) {
                    Ok(read) => {
                        assert!(
                            read == plain,
                            "bit {bit} of {algorithm:?} changes what is read"
                        );
                        assert!(
                            bit / 8 >= trailer && final_header,
                            "bit {bit} of {algorithm:?} is not seen"
                        );
                    }
                    Err(Error::Format(_) | Error::Unsupported(_) | Error::Io(_)) => {}
                    Err(other) => panic!("bit {bit}: {other}"),
                }
            }
        }
    }
}

#[test]
fn every_truncation_is_an_error() {
    for (final_header, digest) in [(false, true), (true, true), (true, false)] {
        let plain = content(Content::Text, 9, 9000);
        let mut file = zfile(&plain, Options::default(), final_header);
        if !digest {
            let trailer = file.len() - HEADER;
            file[32] &= !0b1_0000;
            file[28..32].fill(0);
            file[trailer + 32] &= !0b1_0000;
            file[trailer + 28..trailer + 32].fill(0);
        }
        assert!(plain_of(file.clone()).expect("whole") == plain);
        for length in 0..file.len() {
            assert!(
                open(&file[..length]).is_err(),
                "{length} of {} bytes open",
                file.len()
            );
        }
    }
}

#[test]
fn a_final_header_needs_no_trailer_and_a_trailer_no_final_header() {
    let plain = content(Content::Text, 2, 10_000);
    let mut file = zfile(&plain, Options::default(), true);
    let trailer = file.len() - HEADER;
    file[trailer..].fill(0x55);
    let opened = open(file).expect("open by the header");
    assert!(read_all(&opened).expect("read") == plain);
    assert!(opened.verify().is_err());

    let mut file = zfile(&plain, Options::default(), false);
    patch_zfile(&mut file, 40, &[0xFF; 24]);
    assert!(plain_of(file).expect("open by the trailer") == plain);
}

/// What other readers believe without a look: all with right digests.
#[test]
fn contradictions_are_errors() {
    let plain = content(Content::Text, 4, 20_000);
    let good = zfile(&plain, Options::default(), false);
    let trailer = good.len() - HEADER;
    let damaged = |at: usize, field: &[u8]| {
        let mut file = good.clone();
        patch_zfile(&mut file[trailer..], at, field);
        open(file).map(|_| ()).expect_err("opens")
    };
    let offset = u64_at(&good, trailer + 40);
    for (what, at, field) in [
        ("table behind the end", 40, (offset + 1).to_le_bytes()),
        ("table beyond all", 40, u64::MAX.to_le_bytes()),
        ("table in the header", 40, 8u64.to_le_bytes()),
        (
            "table before the last block",
            40,
            (offset - 4).to_le_bytes(),
        ),
        ("a block less", 48, 4u64.to_le_bytes()),
        ("a block more", 48, 6u64.to_le_bytes()),
        ("no blocks", 48, 0u64.to_le_bytes()),
        ("2^62 blocks", 48, (1u64 << 62).to_le_bytes()),
        ("no bytes", 56, 0u64.to_le_bytes()),
        ("2^60 bytes", 56, (1u64 << 60).to_le_bytes()),
        ("a table of another sum", 64, [9; 8]),
        ("blocks of 4095 bytes", 72, [0xFF, 0x0F, 0, 0, 1, 0, 0, 0]),
        ("blocks of no bytes", 72, [0, 0, 0, 0, 1, 0, 0, 0]),
        ("blocks of 128 KiB", 72, [0, 0, 2, 0, 1, 0, 0, 0]),
        ("MiniLZO", 72, [0, 0x10, 0, 0, 0, 0, 0, 0]),
        ("a dictionary", 72, [0, 0x10, 0, 0, 1, 0, 1, 0]),
        ("a compressed table", 32, 0x36u64.to_le_bytes()),
        ("an unsealed trailer", 32, 0x12u64.to_le_bytes()),
        ("a header for a trailer", 32, 0x17u64.to_le_bytes()),
    ] {
        let error = damaged(at, &field);
        assert!(
            !matches!(error, Error::Io(_) | Error::Invalid(_)),
            "{what}: {error}"
        );
    }

    let mut file = good.clone();
    file[trailer + 100] = 1;
    assert!(
        matches!(open(file), Err(Error::Format(_))),
        "digest of the trailer"
    );

    // A table whose sum is right, but not its sizes; its checksum is made to fit.
    let table = u64_at(&good, trailer + 40) as usize;
    for (first, second) in [(0, 0), (4, 0), (u32::MAX, 1), (9000, 0)] {
        let mut file = good.clone();
        let sum = u32_at(&file, table).wrapping_add(u32_at(&file, table + 4));
        let second = if second == 0 {
            sum.wrapping_sub(first)
        } else {
            second
        };
        file[table..table + 4].copy_from_slice(&first.to_le_bytes());
        file[table + 4..table + 8].copy_from_slice(&second.to_le_bytes());
        let crc = checksum::raw(0, &file[table..trailer]);
        patch_zfile(&mut file[trailer..], 64, &crc.to_le_bytes());
        assert!(
            matches!(open(file), Err(Error::Format(_))),
            "sizes {first}, {second}"
        );
    }

    // Sizes that could be, but end before or behind the place where the table begins.
    for change in [-1, 1] {
        let mut file = good.clone();
        let size = u32_at(&file, table).wrapping_add_signed(change);
        file[table..table + 4].copy_from_slice(&size.to_le_bytes());
        let crc = checksum::raw(0, &file[table..trailer]);
        patch_zfile(&mut file[trailer..], 64, &crc.to_le_bytes());
        assert!(
            matches!(open(file), Err(Error::Format(_))),
            "sum and {change}"
        );
    }
}

/// Blocks without checksum whose bytes decompress to another length than they must.
#[test]
fn blocks_of_wrong_length_are_errors() {
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        let make = |size: usize| {
            let options = Options {
                verify: false,
                ..options(algorithm, 8192)
            };
            zfile(&content(Content::Text, 8, size), options, true)
        };
        let file = make(8192);
        for (block_size, original, blocks) in [
            (4096u32, 4096u64, 1u64),
            (16384, 16384, 1),
            (16384, 8193, 1),
            (8192, 8191, 1),
        ] {
            let mut file = file.clone();
            for start in [0, file.len() - HEADER] {
                let header = &mut file[start..start + HEADER];
                header[72..76].copy_from_slice(&block_size.to_le_bytes());
                header[48..56].copy_from_slice(&blocks.to_le_bytes());
                patch_zfile(header, 56, &original.to_le_bytes());
            }
            let opened = open(file).expect("only the block is wrong");
            let error = read_all(&opened).expect_err("reads");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            let mut small = [0; 512];
            assert!(
                opened.read_exact_at(&mut small, 0).is_err(),
                "a part of the block"
            );
        }
    }
}
