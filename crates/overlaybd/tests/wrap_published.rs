//! Two published layers of the reference implementation, if `AENV_OVERLAYBD_BLOBS` names a directory that has them:
//! `022231c3…3672d` (a blob: tar, ZFile, LSMT) and `ext4_64` (an old ZFile). Without the variable it is reported as ignored.

mod wrap_support;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overlaybd::io::ReadAt;
use overlaybd::layer::Layer;
use overlaybd::probe::{open_layer, verify_layer, Wrapper};
use overlaybd::record::Record;
use overlaybd::stack::{Lowers, Stack};
use overlaybd::zfile::ZFile;
use overlaybd::{tar, Uuid};

use wrap_support::{sha256, u32_at, u64_at};

const VARIABLE: &str = "AENV_OVERLAYBD_BLOBS";
const BLOB: &str = "022231c3f1af70e0cc42f0c3781eabf174cff608210585bf93fc83e16d33672d";
const BASE: &str = "ext4_64";
/// Name and body, which gets the directory.
type Test = (&'static str, fn(&Path));

const TESTS: [Test; 2] = [
    ("published_blob", published_blob),
    ("published_base", published_base),
];

fn main() {
    let listing = std::env::args().any(|argument| argument == "--list");
    if listing {
        TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    println!("\nrunning {} tests", TESTS.len());
    match std::env::var_os(VARIABLE) {
        Some(directory) => {
            let directory = PathBuf::from(directory);
            for (name, test) in TESTS {
                test(&directory);
                println!("test {name} ... ok");
            }
            println!(
                "\ntest result: ok. {} passed; 0 failed; 0 ignored\n",
                TESTS.len()
            );
        }
        None => {
            for (name, _) in TESTS {
                println!("test {name} ... ignored, {VARIABLE} is not set");
            }
            println!(
                "\ntest result: ok. 0 passed; 0 failed; {} ignored\n",
                TESTS.len()
            );
        }
    }
}

fn source(directory: &Path, name: &str, size: u64, digest: &str) -> Arc<dyn ReadAt> {
    let path = directory.join(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(bytes.len() as u64, size);
    assert_eq!(sha256(&bytes), digest);
    Arc::new(File::open(path).expect("open"))
}

/// The plain file, after a look at its length and digest.
fn check_plain(zfile: &ZFile, size: u64, digest: &str) {
    use sha2::Digest as _;
    assert_eq!(zfile.len().expect("length"), size);
    let mut hash = sha2::Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut offset = 0;
    while offset < size {
        let count = buffer.len().min((size - offset) as usize);
        zfile
            .read_exact_at(&mut buffer[..count], offset)
            .expect("read");
        hash.update(&buffer[..count]);
        offset += count as u64;
    }
    let found: String = hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(found, digest);
}

fn published_blob(directory: &Path) {
    let blob = source(directory, BLOB, 642_560, BLOB);
    let member = tar::open(&blob).expect("tar").expect("a tar");
    assert_eq!((member.offset(), member.size()), (1536, 639_491));
    let mut head = [0; tar::HEAD_SIZE];
    blob.read_exact_at(&mut head, 0).expect("read");
    assert_eq!(head, tar::head(639_491), "we write the same head");
    let mut ends = [[0; 512]; 2];
    member.read_exact_at(&mut ends[0], 0).expect("read");
    member
        .read_exact_at(&mut ends[1], 639_491 - 512)
        .expect("read");
    assert_eq!(ends.map(|end| u64_at(&end, 32)), [0x1B, 0x16]);
    assert_eq!(ends.map(|end| u32_at(&end, 28)), [0x0F1F_3445, 0xFFDF_E161]);

    let zfile = ZFile::open(Arc::new(member)).expect("zfile");
    let header = zfile.header();
    assert_eq!(
        (header.blocks, header.index_offset, header.index_crc),
        (17_463, 569_127, 0x6DBA_55B0)
    );
    zfile.verify().expect("verify");
    check_plain(
        &zfile,
        71_528_448,
        "39195424aa10572fe002262190877b4306a66be9c62c8f1594141b01dc79c2ea",
    );

    let opened = verify_layer(blob).expect("layer");
    assert_eq!(opened.wrappers, [Wrapper::Tar, Wrapper::Zfile]);
    let layer = opened.layer;
    assert_eq!(layer.virtual_size(), 64 << 30);
    assert_eq!(
        layer.uuid(),
        Uuid::try_parse("01BB4FCE-3EB1-B56B-05AD-F99504DAFD31").expect("uuid")
    );
    assert_eq!(
        (layer.trailer().index_offset, layer.trailer().index_size),
        (71_512_064, 768)
    );
    assert_eq!(layer.records(), 515);
    assert_eq!(first_records(&layer), [(0, 8448, 8), (12288, 256, 8456)]);
    check_ext4(layer);
}

fn published_base(directory: &Path) {
    let base = source(
        directory,
        BASE,
        4_737_695,
        "c3a417552a6cf9ffa959b541850bab7d7f08f4255425bf8b48c85f7b36b378d9",
    );
    let zfile = ZFile::open(Arc::clone(&base)).expect("zfile");
    assert!(!zfile.header().digest);
    assert_eq!(zfile.header().blocks, 132_309);
    zfile.verify().expect("verify");
    check_plain(
        &zfile,
        541_937_664,
        "799dbd74cbcfbd7f37611057130b20fda0e1e671280df97cc3a05d73620d5ac7",
    );
    let opened = open_layer(base).expect("layer");
    assert_eq!(opened.wrappers, [Wrapper::Zfile]);
    let layer = opened.layer;
    assert_eq!(layer.trailer().index_size, 8448);
    assert_eq!((layer.records(), layer.zero_records()), (8323, 8209));
    assert_eq!(
        layer.index().iter().map(|record| record.length).max(),
        Some(16_383)
    );
    check_ext4(layer);
}

fn first_records(layer: &Layer) -> Vec<(u64, u32, u64)> {
    let place = |record: Record| (record.lba, record.length, record.physical);
    layer.index().iter().take(2).map(place).collect()
}

/// The magic of the file system lies at byte 1080 of the device.
fn check_ext4(layer: Layer) {
    let lowers = Lowers::merge(vec![Arc::new(layer)]).expect("merge");
    let stack = Stack::open(lowers, None).expect("stack");
    let mut sector = [0; 512];
    stack.read_at(&mut sector, 1024).expect("read");
    assert_eq!(sector[56..58], [0x53, 0xEF]);
}
