//! Hostile ZFiles, their checksums right.

use overlaybd::checksum;
use overlaybd::zfile::Algorithm;

use super::super::layers::{tar_of, zfile_of, Record};
use super::layers::{good_layer, lsmt, put, put_u64};
use super::{Entry, Outcome};

/// The stored form of one block, with its checksum.
fn block(compressed: &[u8]) -> Vec<u8> {
    let crc = checksum::raw(checksum::BLOCK_SALT, compressed);
    [compressed, &crc.to_le_bytes()].concat()
}

/// A ZFile of these stored blocks, all checksums right, its trailer changed by `change`.
fn zfile(algorithm: u8, stored: &[Vec<u8>], original: u64, change: impl Fn(&mut [u8])) -> Vec<u8> {
    let sizes: Vec<u32> = stored.iter().map(|block| block.len() as u32).collect();
    zfile_with_table(algorithm, &stored.concat(), &sizes, original, change)
}

fn zfile_with_table(
    algorithm: u8,
    blocks: &[u8],
    sizes: &[u32],
    original: u64,
    change: impl Fn(&mut [u8]),
) -> Vec<u8> {
    let table: Vec<u8> = sizes.iter().flat_map(|size| size.to_le_bytes()).collect();
    let mut header = vec![0; 512];
    header[..24].copy_from_slice(b"ZFile\0\x01\0tuji.yyf@Alibaba");
    header[24] = 96;
    header[32] = 0x13;
    header[72..76].copy_from_slice(&4096u32.to_le_bytes());
    header[76] = algorithm;
    header[88] = 1;
    let mut trailer = header.clone();
    trailer[32] = 0x16;
    trailer[40..48].copy_from_slice(&(512 + blocks.len() as u64).to_le_bytes());
    trailer[48..56].copy_from_slice(&(sizes.len() as u64).to_le_bytes());
    trailer[56..64].copy_from_slice(&original.to_le_bytes());
    trailer[64..68].copy_from_slice(&checksum::raw(0, &table).to_le_bytes());
    change(&mut trailer);
    for header in [&mut header, &mut trailer] {
        header[28..32].fill(0);
        let digest = checksum::raw(0, header);
        header[28..32].copy_from_slice(&digest.to_le_bytes());
    }
    [&header, blocks, &table, &trailer].concat()
}

/// An LZ4 block of one literal and `extra` times 255 more bytes of it: 4096 plain bytes take 16.
fn lz4_run(extra: usize) -> Vec<u8> {
    [
        &[0x1F, 0, 1, 0][..],
        &vec![0xFF; extra],
        &[0xF6, 0x50, 0, 0, 0, 0, 0],
    ]
    .concat()
}

/// A Zstandard frame that promises `size` bytes, or a window of the largest size, and holds a run of one byte.
fn zstd_run(size: Option<u64>, run: u32) -> Vec<u8> {
    let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD];
    match size {
        Some(size) => {
            frame.push(0b1110_0000);
            frame.extend_from_slice(&size.to_le_bytes());
        }
        None => frame.extend_from_slice(&[0, 0xFF]),
    }
    frame.extend_from_slice(&(run << 3 | 0b011).to_le_bytes()[..3]);
    frame.push(0);
    frame
}

pub fn all() -> Vec<Entry> {
    use Outcome::{Format, Limit, Shows, Unreadable, Unsupported};
    let layer = good_layer();
    let good = zfile_of(&layer, Algorithm::Lz4, false);
    let lz4 = |compressed: &[u8]| with_data_block(1, compressed);
    let zstd = |compressed: &[u8]| with_data_block(2, compressed);
    let zeros = block(&lz4_run(15));
    let with = |change: &dyn Fn(&mut [u8])| zfile(1, std::slice::from_ref(&zeros), 4096, change);
    let tabled = |sizes: &[u32]| zfile_with_table(1, &zeros.repeat(2), sizes, 8192, |_| ());
    // A layer of which the header and the trailer are fine, and the block of data in between is not.
    let stored = |at: usize| {
        let compressed = lz4_flex::block::compress(&layer[at..layer.len().min(at + 4096)]);
        block(&compressed)
    };
    let mut blocks: Vec<Vec<u8>> = (0..layer.len()).step_by(4096).map(stored).collect();
    let size = layer.len() as u64;
    let rebuilt = zfile(1, &blocks, size, |_| ());
    let last = blocks[0].len() - 1;
    blocks[0][last] ^= 1;
    let damaged = zfile(1, &blocks, size, |_| ());
    vec![
        ("zfile-good-lz4", good.clone(), Shows(b"A")),
        (
            "zfile-good-zstd",
            zfile_of(&layer, Algorithm::Zstd, true),
            Shows(b"A"),
        ),
        ("zfile-good-by-hand", rebuilt, Shows(b"A")),
        (
            "zfile-in-zfile",
            zfile_of(&good, Algorithm::Zstd, true),
            Format,
        ),
        (
            "zfile-of-a-tar",
            zfile_of(&tar_of(&layer), Algorithm::Zstd, true),
            Format,
        ),
        ("zfile-of-zeros", with(&|_| ()), Format),
        ("zfile-header-alone", good[..512].to_vec(), Format),
        ("zfile-header-twice", good[..512].repeat(2), Format),
        ("zfile-block-with-a-wrong-checksum", damaged, Format),
        ("zfile-of-2-60-bytes", with(&put_u64(56, 1 << 60)), Format),
        (
            "zfile-of-2-60-bytes-in-as-many-blocks",
            with(&put(
                48,
                [(1u64 << 48).to_le_bytes(), (1u64 << 60).to_le_bytes()].concat(),
            )),
            Limit,
        ),
        (
            "zfile-of-2-28-blocks",
            with(&put(
                48,
                [(1u64 << 28).to_le_bytes(), (1u64 << 40).to_le_bytes()].concat(),
            )),
            Format,
        ),
        ("zfile-of-nothing", with(&put(48, [0; 16])), Format),
        (
            "zfile-table-beyond-the-end",
            with(&put_u64(40, 1 << 40)),
            Format,
        ),
        (
            "zfile-table-offset-overflows",
            with(&put_u64(40, u64::MAX - 100)),
            Format,
        ),
        ("zfile-table-in-the-header", with(&put_u64(40, 64)), Format),
        (
            "zfile-blocks-of-2-31",
            with(&put(72, [0, 0, 0, 0x80])),
            Limit,
        ),
        ("zfile-blocks-of-0", with(&put(72, [0; 4])), Format),
        ("zfile-blocks-of-3", with(&put(72, [3, 0, 0, 0])), Format),
        ("zfile-blocks-of-1", with(&put(72, [1, 0, 0, 0])), Format),
        ("zfile-minilzo", with(&put(76, [0])), Unsupported),
        ("zfile-algorithm-200", with(&put(76, [200])), Unsupported),
        ("zfile-dictionary", with(&put(78, [1])), Unsupported),
        (
            "zfile-dictionary-size",
            with(&put(84, [0xFF; 4])),
            Unsupported,
        ),
        (
            "zfile-compressed-table",
            with(&put(32, [0x36])),
            Unsupported,
        ),
        (
            "zfile-table-of-giants",
            tabled(&[u32::MAX, u32::MAX]),
            Format,
        ),
        (
            "zfile-table-that-wraps",
            tabled(&[u32::MAX - 3, 4 + zeros.len() as u32 * 2]),
            Format,
        ),
        (
            "zfile-table-with-zeros",
            tabled(&[0, zeros.len() as u32 * 2]),
            Format,
        ),
        (
            "zfile-table-of-checksums-alone",
            tabled(&[4, zeros.len() as u32 * 2 - 4]),
            Format,
        ),
        (
            "zfile-table-of-another-sum",
            tabled(&[zeros.len() as u32, zeros.len() as u32 - 1]),
            Format,
        ),
        ("zfile-lz4-block-too-long", lz4(&lz4_run(2000)), Unreadable),
        ("zfile-lz4-block-too-short", lz4(&lz4_run(3)), Unreadable),
        (
            "zfile-lz4-match-before-the-start",
            lz4(&[0x10, 0, 0xFF, 0xFF, 0x50, 0, 0, 0, 0, 0]),
            Unreadable,
        ),
        (
            "zfile-lz4-match-at-0",
            lz4(&[0x10, 0, 0, 0, 0x50, 0, 0, 0, 0, 0]),
            Unreadable,
        ),
        (
            "zfile-lz4-literals-beyond-the-end",
            lz4(&[0xF0, 0xFF, 0xFF, 0xFF, 0xFF, 0]),
            Unreadable,
        ),
        (
            "zfile-lz4-length-without-end",
            lz4(&[0xFF; 4000]),
            Unreadable,
        ),
        (
            "zfile-zstd-block-of-2-60",
            zstd(&zstd_run(Some(1 << 60), 4096)),
            Unreadable,
        ),
        (
            "zfile-zstd-block-too-long",
            zstd(&zstd_run(Some(100_000), 100_000)),
            Unreadable,
        ),
        (
            "zfile-zstd-largest-window",
            zstd(&zstd_run(None, 100_000)),
            Unreadable,
        ),
        (
            "zfile-zstd-skippable-frame",
            zstd(&[0x50, 0x2A, 0x4D, 0x18, 0xFF, 0xFF, 0xFF, 0xFF]),
            Unreadable,
        ),
        (
            "zfile-zstd-block-too-short",
            zstd(&zstd_run(Some(10), 10)),
            Unreadable,
        ),
        ("zfile-good-lz4-run", lz4(&lz4_run(15)), Shows(&[0; 4096])),
        (
            "zfile-good-zstd-run",
            zstd(&zstd_run(Some(4096), 4096)),
            Shows(&[0; 4096]),
        ),
    ]
}

/// A layer whose header, index and trailer are whole and whose only data lies in a block stored as `compressed`.
fn with_data_block(algorithm: u8, compressed: &[u8]) -> Vec<u8> {
    let layer = lsmt(&[Record::data(0, 8, 8)], &[b'A'; 4096], |_| ());
    let store = |plain: &[u8]| match algorithm {
        1 => lz4_flex::block::compress(plain),
        _ => zstd::bulk::compress(plain, 3).expect("compress"),
    };
    let mut blocks: Vec<Vec<u8>> = layer
        .chunks(4096)
        .map(|plain| block(&store(plain)))
        .collect();
    blocks[1] = block(compressed);
    zfile(algorithm, &blocks, layer.len() as u64, |_| ())
}
