//! Valid layers of every form, damaged at random, cut, and with each bit flipped: an error or the right bytes, never a panic,
//! a loop, or much memory.

mod hostile_support;

use std::ops::Range;

use overlaybd::probe::verify_layer;
use overlaybd::zfile::Algorithm;
use overlaybd::{checksum, Error};
use proptest::prelude::*;

use hostile_support::layers::{
    committed, sample, sealed, tar_of, u64_at, wrap, zfile_of, Form, Oracle, Record, SLOT,
};
use hostile_support::mutation::{apply, cases, mutations};
use hostile_support::{explore, Budgeted};

const FORMS: [Form; 5] = [
    Form::Raw,
    Form::Zfile(Algorithm::Lz4, true),
    Form::Zfile(Algorithm::Lz4, false),
    Form::Zfile(Algorithm::Zstd, true),
    Form::Zfile(Algorithm::Zstd, false),
];

#[test]
fn all_forms_show_the_same_device() {
    for seed in 0..6 {
        for is_sealed in [false, true] {
            let (layer, model) = sample(is_sealed, seed);
            for form in FORMS {
                for in_tar in [false, true] {
                    let file = wrap(&layer, form, in_tar);
                    let view = explore(&file)
                        .unwrap_or_else(|error| panic!("{form:?}, tar {in_tar}: {error}"));
                    assert!(
                        view.agrees_with(&model),
                        "{form:?}, tar {in_tar}, seed {seed}"
                    );
                    assert_eq!(
                        view.wrappers.len(),
                        usize::from(in_tar) + usize::from(form != Form::Raw)
                    );
                    verify_layer(Budgeted::shared(&file)).expect("verify");
                }
            }
        }
    }
}

/// The fields and the index of a plain layer.
fn hot_of_layer(layer: &[u8]) -> Vec<Range<usize>> {
    let trailer = layer.len() - SLOT;
    let index = u64_at(layer, trailer + 32) as usize;
    vec![
        0..134,
        trailer..trailer + 134,
        index..index + 256,
        trailer + 28..trailer + 56,
        index..index + 16,
    ]
}

fn hot_of_zfile(file: &[u8]) -> Vec<Range<usize>> {
    let trailer = file.len() - 512;
    let table = u64_at(file, trailer + 40) as usize;
    vec![24..96, trailer + 24..trailer + 96, table..trailer, 512..600]
}

/// Make digests and the table's checksum right where there is something to make right, so that what is behind them is reached.
fn repair_zfile(file: &mut [u8]) {
    if file.len() < 1024 {
        return;
    }
    let trailer = file.len() - 512;
    let table = usize::try_from(u64_at(file, trailer + 40)).ok();
    if let Some(table) = table.and_then(|start| file.get(start..trailer)) {
        let crc = checksum::raw(0, table).to_le_bytes();
        file[64..68].copy_from_slice(&crc);
        file[trailer + 64..trailer + 68].copy_from_slice(&crc);
    }
    for start in [0, trailer] {
        let header = &mut file[start..start + 512];
        header[28..32].fill(0);
        let digest = checksum::raw(0, header);
        header[28..32].copy_from_slice(&digest.to_le_bytes());
    }
}

fn repair_tar(file: &mut [u8]) {
    for start in [0, 1024] {
        let Some(block) = file.get_mut(start..start + 512) else {
            return;
        };
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:>6o} ").as_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// A damaged LSMT file may still be one, with other content: then the simple reader must see the same.
    #[test]
    fn damaged_layers(
        is_sealed: bool,
        seed in 0u64..50,
        mutations in mutations(),
        form in prop::sample::select(FORMS.to_vec()),
        in_tar: bool,
    ) {
        let (mut layer, _) = sample(is_sealed, seed);
        let hot = hot_of_layer(&layer);
        apply(&mutations, &mut layer, &hot);
        if layer.is_empty() {
            return Ok(());
        }
        let Ok(view) = explore(&wrap(&layer, form, in_tar)) else {
            return Ok(());
        };
        let oracle = Oracle::of(&layer).expect("what opens has a trailer and an index");
        prop_assert_eq!(view.virtual_size, oracle.virtual_size());
        for (offset, bytes) in view.reads {
            let expected = oracle.read(offset, bytes.len());
            prop_assert!(expected == Some(bytes), "device at {}", offset);
        }
    }

    /// A damaged ZFile that still opens shows what was written.
    #[test]
    fn damaged_zfiles(
        is_sealed: bool,
        seed in 0u64..50,
        mutations in mutations(),
        form in prop::sample::select(FORMS[1..].to_vec()),
        in_tar: bool,
    ) {
        let (layer, model) = sample(is_sealed, seed);
        let mut file = wrap(&layer, form, false);
        let hot = hot_of_zfile(&file);
        apply(&mutations, &mut file, &hot);
        if in_tar {
            file = tar_of(&file);
        }
        if let Ok(view) = explore(&file) {
            prop_assert!(view.agrees_with(&model));
        }
    }

    /// As an attacker does it, who knows how to compute checksums: anything may come out but harm.
    #[test]
    fn forged_wrappers(
        seed in 0u64..50,
        form in prop::sample::select(FORMS.to_vec()),
        inner in mutations(),
        outer in mutations(),
        in_tar: bool,
    ) {
        let (layer, _) = sample(seed % 2 == 0, seed);
        let mut file = wrap(&layer, form, false);
        if form != Form::Raw {
            let hot = hot_of_zfile(&file);
            apply(&inner, &mut file, &hot);
            repair_zfile(&mut file);
        }
        if in_tar {
            file = tar_of(&file);
            apply(&outer, &mut file, &[124..136, 156..157, 512..540, 1024 + 124..1024 + 136, 1024 + 156..1024 + 157]);
            repair_tar(&mut file);
        }
        let _ = explore(&file);
        let _ = verify_layer(Budgeted::shared(&file));
    }

    #[test]
    fn random_bytes_are_no_layer(
        mut bytes in prop::collection::vec(any::<u8>(), 0..3000),
        magic in prop::sample::select(vec![&b""[..], b"ZFile\0\x01\0tuji.yyf@Alibaba", b"LSMT\0\x01\x02\0"]),
    ) {
        let count = magic.len().min(bytes.len());
        bytes[..count].copy_from_slice(&magic[..count]);
        prop_assert!(explore(&bytes).is_err());
        bytes.resize(bytes.len() * 4, 0);
        prop_assert!(explore(&bytes).is_err());
    }
}

#[test]
fn every_truncation_of_every_form_is_an_error() {
    let (layer, _) = small();
    let raw = wrap(&layer, Form::Raw, false);
    let in_place = sealed(8192, &[Record::data(0, 8, 8)], &[7; 4096], 0x03);
    let wrapped = FORMS[1..].iter().map(|form| wrap(&layer, *form, false));
    for plain in [raw, in_place].into_iter().chain(wrapped) {
        for file in [tar_of(&plain), plain] {
            explore(&file).expect("the whole file is a layer");
            for length in 0..file.len() {
                match explore(&file[..length]) {
                    Ok(_) => panic!("{length} of {} bytes are a layer", file.len()),
                    Err(Error::Format(_) | Error::Io(_)) => {}
                    Err(other) => panic!("{length} of {} bytes: {other}", file.len()),
                }
            }
        }
    }
}

/// A layer that is small when compressed, and its model.
fn small() -> (Vec<u8>, Vec<u8>) {
    let data: Vec<u8> = (0..4096u32).map(|at| (at / 100) as u8 + 1).collect();
    let records = [
        Record::data(0, 5, 8),
        Record::zero(5, 2, 13),
        Record::data(9, 3, 13),
    ];
    let layer = committed(8192, &records, &data);
    let mut model = vec![0; 8192];
    model[..5 * 512].copy_from_slice(&data[..5 * 512]);
    model[9 * 512..12 * 512].copy_from_slice(&data[5 * 512..]);
    (layer, model)
}

/// Of a layer in a ZFile in a tar, too, no bit can change without being seen or without being no part of it.
#[test]
fn every_flipped_bit_of_a_wrapped_zfile_is_detected_or_harmless() {
    let (layer, model) = small();
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        let inner = zfile_of(&layer, algorithm, true);
        let file = tar_of(&inner);
        let payload = 1536..1536 + inner.len();
        let trailer = payload.end - 512..payload.end;
        for bit in 0..file.len() * 8 {
            let at = bit / 8;
            let is_inside = payload.contains(&at);
            if !is_inside && bit % 8 != at % 8 {
                continue;
            }
            let mut damaged = file.clone();
            damaged[at] ^= 1 << (bit % 8);
            if let Ok(view) = explore(&damaged) {
                assert!(view.agrees_with(&model), "bit {bit} changes what is read");
                assert!(!is_inside || trailer.contains(&at), "bit {bit} is not seen");
                let verified = verify_layer(Budgeted::shared(&damaged));
                assert!(!is_inside || verified.is_err(), "bit {bit} is verified");
            }
        }
    }
}
