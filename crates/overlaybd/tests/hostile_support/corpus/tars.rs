//! Hostile tar archives, the checksums of their headers right.

use overlaybd::zfile::Algorithm;

use super::super::layers::{tar_of, zfile_of};
use super::layers::good_layer;
use super::{Entry, Outcome};

/// A header block as tar programs write it, its checksum right.
fn tar_header(kind: u8, size: &[u8; 12]) -> [u8; 512] {
    let mut block = [0; 512];
    block[..5].copy_from_slice(b"layer");
    block[124..136].copy_from_slice(size);
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn octal(size: usize) -> [u8; 12] {
    format!("{size:011o}\0")
        .into_bytes()
        .try_into()
        .expect("twelve bytes")
}

pub fn all() -> Vec<Entry> {
    use Outcome::{Format, Limit, Shows};
    let layer = good_layer();
    let of = |kind: u8, size: &[u8; 12]| [&tar_header(kind, size)[..], &layer, &[0; 1024]].concat();
    let pax = |records: &[u8]| {
        let mut body = records.to_vec();
        body.resize(body.len().next_multiple_of(512), 0);
        [
            &tar_header(b'x', &octal(records.len()))[..],
            &body,
            &of(b'0', &octal(0)),
        ]
        .concat()
    };
    assert!(
        (10_000..99_000).contains(&layer.len()),
        "the sizes below have five digits"
    );
    let right = format!("14 size={}\n", layer.len());
    let whole = tar_of(&layer);
    vec![
        ("tar-good", whole.clone(), Shows(b"A")),
        (
            "tar-good-of-zfile",
            tar_of(&zfile_of(&layer, Algorithm::Lz4, true)),
            Shows(b"A"),
        ),
        (
            "tar-good-of-another-program",
            of(b'0', &octal(layer.len())),
            Shows(b"A"),
        ),
        (
            "tar-good-long-pax",
            pax(&[
                &b"400 c="[..],
                &[b'c'; 393],
                b"\n",
                b"400 d=",
                &[b'd'; 393],
                b"\n",
                right.as_bytes(),
            ]
            .concat()),
            Shows(b"A"),
        ),
        ("tar-in-tar", tar_of(&whole), Format),
        (
            "tar-cut-in-its-end",
            whole[..whole.len() - 1].to_vec(),
            Format,
        ),
        ("tar-header-alone", whole[..512].to_vec(), Format),
        ("tar-size-negative", of(b'0', &[0xFF; 12]), Format),
        (
            "tar-size-of-2-63",
            of(b'0', b"\x80\0\0\0\x80\0\0\0\0\0\0\0"),
            Format,
        ),
        (
            "tar-size-of-2-64",
            of(b'0', b"\x80\0\0\x01\0\0\0\0\0\0\0\0"),
            Format,
        ),
        ("tar-size-of-8-gib", of(b'0', b"77777777777\0"), Format),
        (
            "tar-size-no-number",
            of(b'0', b"0x1000\0\0\0\0\0\0"),
            Format,
        ),
        ("tar-size-none", of(b'0', &[b' '; 12]), Format),
        ("tar-size-0", of(b'0', &octal(0)), Format),
        ("tar-directory", of(b'5', &octal(0)), Format),
        ("tar-symlink", of(b'2', &octal(0)), Format),
        ("tar-long-name-of-8-gib", of(b'L', b"77777777777\0"), Format),
        (
            "tar-long-name-of-2-63",
            of(b'L', b"\x80\0\0\0\x80\0\0\0\0\0\0\0"),
            Format,
        ),
        (
            "tar-nothing-but-long-names",
            tar_header(b'L', &octal(0)).repeat(40),
            Limit,
        ),
        (
            "tar-nothing-but-pax",
            tar_header(b'x', &octal(0)).repeat(40),
            Limit,
        ),
        (
            "tar-pax-size-of-2-63",
            pax(b"28 size=9223372036854775808\n"),
            Format,
        ),
        (
            "tar-pax-size-of-2-64",
            pax(b"29 size=18446744073709551616\n"),
            Format,
        ),
        ("tar-pax-size-negative", pax(b"11 size=-1\n"), Format),
        ("tar-pax-size-0", pax(b"9 size=0\n"), Format),
        (
            "tar-pax-size-one-too-many",
            pax(format!("14 size={}\n", layer.len() + 512).as_bytes()),
            Format,
        ),
        ("tar-pax-record-of-length-0", pax(b"0 size=1\n"), Format),
        ("tar-pax-record-of-length-1", pax(b"1 1 1 1 1 1"), Format),
        (
            "tar-pax-record-longer-than-all",
            pax(b"99 size=1\n"),
            Format,
        ),
        (
            "tar-pax-record-of-2-64",
            pax(b"18446744073709551616 size=1\n"),
            Format,
        ),
        ("tar-pax-of-nothing", pax(&[0; 100]), Format),
        (
            "tar-pax-of-100-kib",
            pax(&b"9 a=bcde\n".repeat(100 << 10 >> 3)[..100 << 10]),
            Limit,
        ),
    ]
}
