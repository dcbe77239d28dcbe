//! The tar wrapper byte for byte, and archives of others: base at its real place, other headers skipped, damage seen.

mod wrap_support;

use std::io::{self, Cursor, Seek, SeekFrom, Write};
use std::sync::Arc;

use overlaybd::io::ReadAt;
use overlaybd::{tar, zfile, Error};
use proptest::prelude::*;

use wrap_support::{content, read_all, tarred, Content, Memory};

const BLOCK: usize = 512;

fn open(bytes: impl Into<Vec<u8>>) -> overlaybd::Result<Option<tar::Member>> {
    let source: Arc<dyn ReadAt> = Memory::shared(bytes);
    tar::open(&source)
}

fn member(bytes: impl Into<Vec<u8>>) -> (u64, Vec<u8>) {
    let member = open(bytes).expect("open").expect("a tar");
    assert_eq!(member.len().expect("length"), member.size());
    (member.offset(), read_all(&member).expect("read"))
}

/// A header as another program would write it; the checksum is put in at the end.
fn header(name: &str, size: &[u8; 12], kind: u8) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..108].copy_from_slice(b"0000444\0");
    block[124..136].copy_from_slice(size);
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    sum(&mut block);
    block
}

fn sum(block: &mut [u8; BLOCK]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn octal(size: usize) -> [u8; 12] {
    format!("{size:011o}\0")
        .into_bytes()
        .try_into()
        .expect("twelve bytes")
}

fn padded(body: &[u8]) -> Vec<u8> {
    let mut body = body.to_vec();
    body.resize(body.len().next_multiple_of(BLOCK), 0);
    body
}

fn archive(parts: &[(&[u8; BLOCK], &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (header, body) in parts {
        bytes.extend_from_slice(*header);
        bytes.extend_from_slice(&padded(body));
    }
    bytes.extend_from_slice(&[0; 2 * BLOCK]);
    bytes
}

/// The head of a layer of 639 491 bytes, the size of a published one, field by field.
#[test]
fn the_head_byte_for_byte() {
    let mut expected = vec![0; 3 * BLOCK];
    let mut put = |at: usize, text: &[u8]| expected[at..at + text.len()].copy_from_slice(text);
    put(0, b"overlaybd.pax");
    put(124, b"         17 ");
    put(156, b"x");
    put(257, b"ustar\x0000");
    put(512, b"15 size=639491\n");
    put(1024, b"overlaybd.commit");
    put(1024 + 100, b"100644 ");
    put(1024 + 108, b"     0 ");
    put(1024 + 116, b"     0 ");
    put(1024 + 124, b"          0 ");
    put(1024 + 136, b"          0 ");
    put(1024 + 156, b"0");
    put(1024 + 257, b"ustar\x0000");
    put(1024 + 265, b"root");
    put(1024 + 297, b"root");
    for start in [0, 1024] {
        let sum: u32 = expected[start..start + BLOCK]
            .iter()
            .map(|byte| u32::from(*byte))
            .sum();
        let field = format!("{:>6o} ", sum + 8 * u32::from(b' '));
        expected[start + 148..start + 155].copy_from_slice(field.as_bytes());
    }
    assert_eq!(tar::head(639_491).to_vec(), expected);
    assert_eq!(
        3 * BLOCK + 639_491 + tar::tail(639_491).len(),
        642_560,
        "the size of the blob"
    );
}

#[test]
fn pax_records_state_their_own_length() {
    for (size, record) in [
        (1, "9 size=1\n"),
        (9, "9 size=9\n"),
        (10, "11 size=10\n"),
        (1 << 40, "22 size=1099511627776\n"),
        (u64::MAX, "29 size=18446744073709551615\n"),
    ] {
        let head = tar::head(size);
        assert_eq!(&head[512..512 + record.len()], record.as_bytes());
        assert_eq!(
            record.len(),
            record
                .split(' ')
                .next()
                .and_then(|n| n.parse().ok())
                .expect("length")
        );
        let field = format!("{:>11o} ", record.len());
        assert_eq!(&head[124..136], field.as_bytes());
    }
}

#[test]
fn an_archive_of_another_program_is_read_at_its_real_base() {
    let payload = content(Content::Text, 1, 1300);
    let plain = header("layer", &octal(1300), b'0');
    assert_eq!(
        member(archive(&[(&plain, &payload)])),
        (512, payload.clone())
    );

    let old = header("layer", &octal(1300), 0);
    assert_eq!(member(archive(&[(&old, &payload)])), (512, payload.clone()));

    let mut gnu = plain;
    gnu[257..265].copy_from_slice(b"ustar  \0");
    sum(&mut gnu);
    assert_eq!(member(archive(&[(&gnu, &payload)])), (512, payload.clone()));

    let long = vec![b'n'; 700];
    let long_name = header("././@LongLink", &octal(700), b'L');
    let long_link = header("././@LongLink", &octal(3), b'K');
    assert_eq!(
        member(archive(&[
            (&long_name, &long),
            (&long_link, b"abc"),
            (&plain, &payload)
        ])),
        (512 + 1024 + 1024 + 512, payload.clone())
    );

    let global = header("pax_global_header", &octal(10), b'g');
    assert_eq!(
        member(archive(&[(&global, b"10 size=7\n"), (&plain, &payload)])),
        (1536, payload.clone()),
        "sizes of global headers are not for this member"
    );

    // A pax body of more than one block moves the base, which naive readers take for 1536.
    let mut records = format!("{} comment={}\n", 600, "c".repeat(600 - 13)).into_bytes();
    assert_eq!(records.len(), 600);
    records.extend_from_slice(b"13 size=1300\n");
    let pax = header("PaxHeaders", &octal(records.len()), b'x');
    let empty = header("layer", &octal(0), b'0');
    assert_eq!(
        member(archive(&[(&pax, &records), (&empty, &payload)])),
        (512 + 1024 + 512, payload.clone())
    );

    let pax = header("PaxHeaders", &octal(10), b'x');
    assert_eq!(
        member(archive(&[(&pax, b"10 size=0\n"), (&plain, &payload)])),
        (1536, payload.clone()),
        "no size in it"
    );

    let binary = header("layer", b"\x80\0\0\0\0\0\0\0\0\0\x05\x14", b'0');
    assert_eq!(member(archive(&[(&binary, &payload)])), (512, payload));
}

#[test]
fn what_is_no_archive_is_left_alone() {
    let is_none = |bytes: &[u8]| matches!(open(bytes), Ok(None));
    assert!(is_none(b""));
    assert!(is_none(&[0; 511]));
    assert!(is_none(&[0; 4096]));
    assert!(is_none(&content(Content::Noise, 1, 9999)));
    let mut bytes = tarred(b"payload");
    bytes[0] ^= 1;
    assert!(is_none(&bytes), "checksum");
}

/// A file that is still being written, or whose writer died, is no archive and so no layer.
#[test]
fn an_unfinished_archive_is_none() {
    let mut sink = Cursor::new(Vec::new());
    {
        let mut writer = tar::Writer::new(&mut sink).expect("writer");
        writer.write_all(&[7; 3000]).expect("write");
    }
    let bytes = sink.into_inner();
    assert_eq!(&bytes[1024..1037], b"overlaybd.new");
    assert_eq!(&bytes[1024 + 257..1024 + 265], b"xxtar\0xx");
    assert!(matches!(open(bytes), Ok(None)));
}

#[test]
fn impossible_archives_are_errors() {
    let is_format = |bytes: Vec<u8>| matches!(open(bytes), Err(Error::Format(_)));
    let is_limit = |bytes: Vec<u8>| matches!(open(bytes), Err(Error::Limit(_)));
    let file = |size: &[u8; 12]| archive(&[(&header("layer", size, b'0'), b"payload")]);
    assert!(is_format(file(b"77777777777\0")));
    assert!(
        is_format(file(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")),
        "negative"
    );
    assert!(
        is_format(file(b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff")),
        "2^64 - 1"
    );
    assert!(is_format(file(b"         -1 ")));
    assert!(is_format(file(b"not a number")));
    assert!(is_format(file(&[0; 12])));
    let with_pax = |records: &[u8]| {
        archive(&[
            (&header("pax", &octal(records.len()), b'x'), records),
            (&header("layer", &octal(0), b'0'), b"payload"),
        ])
    };
    assert!(is_format(with_pax(b"15 size=999999\n")));
    assert!(is_format(with_pax(b"28 size=18446744073709551615\n")));
    assert!(is_format(with_pax(b"11 size=-5\n")));
    assert!(is_format(with_pax(b"0 size=5\n")));
    assert!(is_format(with_pax(b"7 size=5\n")));
    assert!(is_limit(with_pax(&[b'1'; 70_000])));
    assert!(
        is_format(archive(&[(&header("x", &octal(0), b'x'), b"")])),
        "a header for nothing"
    );
    assert!(is_format(archive(&[(
        &header("x", b"77777777777\0", b'L'),
        b""
    )])));
    assert!(is_format(archive(&[(
        &header("directory", &octal(0), b'5'),
        b""
    )])));
    let many = header("x", &octal(0), b'x');
    assert!(is_limit([&many[..]; 100_000].concat()));
}

#[test]
fn every_truncation_is_an_error_or_no_archive() {
    let bytes = tarred(&content(Content::Text, 1, 700));
    for length in 0..bytes.len() {
        assert!(
            !matches!(open(&bytes[..length]), Ok(Some(_))),
            "{length} of {} bytes",
            bytes.len()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn written_in_both_ways_and_read_back(
        payload in prop::collection::vec(any::<u8>(), 1..5000),
        pieces in prop::collection::vec(1usize..2000, 1..5),
        before in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        let mut sink = Cursor::new(before.clone());
        sink.seek(SeekFrom::End(0))?;
        let mut unknown = tar::Writer::new(sink)?;
        let mut promised = tar::Writer::with_size(Vec::new(), payload.len() as u64)?;
        let mut rest = payload.as_slice();
        for length in pieces.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at(rest.len().min(*length));
            unknown.write_all(now)?;
            promised.write_all(now)?;
            rest = later;
        }
        let sink = unknown.finish()?;
        prop_assert_eq!(sink.position(), sink.get_ref().len() as u64);
        let bytes = sink.into_inner();
        prop_assert_eq!(&bytes[..before.len()], &before[..]);
        let bytes = &bytes[before.len()..];
        prop_assert_eq!(bytes, &promised.finish_promised()?[..]);
        prop_assert_eq!(bytes, &tarred(&payload)[..]);
        prop_assert_eq!(bytes.len() % BLOCK, 0);
        prop_assert_eq!(member(bytes), (1536, payload));
    }
}

#[test]
fn a_promise_must_be_kept() {
    for written in [4, 6] {
        let mut writer = tar::Writer::with_size(Vec::new(), 5).expect("writer");
        writer.write_all(&[1; 10][..written]).expect("write");
        assert!(matches!(writer.finish_promised(), Err(Error::Invalid(_))));
    }
    for size in [0, u64::MAX, u64::MAX - 2048] {
        assert!(
            matches!(
                tar::Writer::with_size(Vec::new(), size),
                Err(Error::Invalid(_))
            ),
            "{size}"
        );
    }
    let empty = tar::Writer::new(Cursor::new(Vec::new())).expect("writer");
    assert!(matches!(empty.finish(), Err(Error::Invalid(_))));
}

/// The ZFile writer goes back to its own first byte, which is not that of the archive.
#[test]
fn a_zfile_inside_gets_its_final_header() {
    let plain = content(Content::Text, 6, 100_000);
    let inner = tar::Writer::new(Cursor::new(Vec::new())).expect("writer");
    let mut writer = zfile::Writer::new(inner, zfile::Options::default()).expect("writer");
    writer.write_all(&plain).expect("write");
    let (inner, summary) = writer.finish_with_header().expect("finish");
    let bytes = inner.finish().expect("finish").into_inner();
    assert_eq!(bytes[1536 + 32], 0x1B);
    let source: Arc<dyn ReadAt> = Memory::shared(bytes.clone());
    let member = tar::open(&source).expect("open").expect("a tar");
    assert_eq!(
        (member.offset(), member.size()),
        (1536, summary.stored_size)
    );
    let opened = zfile::ZFile::open(Arc::new(member)).expect("open");
    opened.verify().expect("verify");
    assert!(read_all(&opened).expect("read") == plain);
}

#[test]
fn reads_stay_inside_the_member() {
    let opened = open(tarred(b"payload")).expect("open").expect("a tar");
    let mut buffer = [0; 3];
    opened.read_exact_at(&mut buffer, 4).expect("read");
    assert_eq!(&buffer, b"oad");
    for offset in [5, 7, u64::MAX] {
        let error = opened
            .read_exact_at(&mut buffer, offset)
            .expect_err("beyond");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
