//! Random damage to files, most of it where it matters.

use std::ops::Range;

use proptest::prelude::*;

/// One thing done to a file. Places are taken modulo what there is.
#[derive(Clone, Debug)]
pub enum Mutation {
    Flip {
        at: usize,
        bit: u8,
    },
    Byte {
        at: usize,
        value: u8,
    },
    /// A number in a field, little-endian as in all headers.
    Number {
        at: usize,
        value: u64,
    },
    Fill {
        at: usize,
        length: usize,
        value: u8,
    },
    Copy {
        from: usize,
        to: usize,
        length: usize,
    },
    Cut {
        length: usize,
    },
    Grow {
        length: usize,
        value: u8,
    },
    Remove {
        at: usize,
        length: usize,
    },
}

impl Mutation {
    fn apply(&self, file: &mut Vec<u8>, hot: &[Range<usize>]) {
        if file.is_empty() {
            return;
        }
        let size = file.len();
        // Most of the time into headers, trailers and tables, where bytes matter most.
        let place = |at: usize| match hot.get(at % (hot.len() + 1)) {
            Some(range) if !range.is_empty() => (range.start + at / 7 % range.len()) % size,
            _ => at / 7 % size,
        };
        match *self {
            Self::Flip { at, bit } => file[place(at)] ^= 1 << (bit % 8),
            Self::Byte { at, value } => file[place(at)] = value,
            Self::Number { at, value } => {
                let at = place(at) / 8 * 8;
                let end = size.min(at + 8);
                file[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
            Self::Fill { at, length, value } => {
                let at = place(at);
                let end = size.min(at + length % 5000);
                file[at..end].fill(value);
            }
            Self::Copy { from, to, length } => {
                let (from, to) = (place(from), place(to));
                let length = (length % 5000).min(size - from.max(to));
                file.copy_within(from..from + length, to);
            }
            Self::Cut { length } => file.truncate(size - 1 - length % size.min(6000)),
            Self::Grow { length, value } => file.resize(size + length % 6000, value),
            Self::Remove { at, length } => {
                let at = place(at);
                let end = size.min(at + length % 5000);
                file.drain(at..end);
            }
        }
    }
}

fn numbers() -> impl Strategy<Value = u64> {
    prop_oneof![
        prop::sample::select(vec![
            0,
            1,
            7,
            8,
            255,
            511,
            512,
            513,
            4095,
            4096,
            8192,
            65_535,
            65_536,
            1 << 20,
            1 << 31,
            (1 << 32) - 1,
            1 << 32,
            1 << 36,
            (1 << 50) - 1,
            1 << 50,
            1 << 55,
            1 << 59,
            1 << 60,
            1 << 62,
            1 << 63,
            u64::MAX - 511,
            u64::MAX,
        ]),
        0u64..40_000,
        (0u64..200, 0u64..40).prop_map(|(lba, length)| lba | length << 50),
        any::<u64>(),
    ]
}

/// Enough to find a new mistake in some runs; `PROPTEST_CASES` asks for more.
pub fn cases() -> u32 {
    std::env::var("PROPTEST_CASES")
        .map_or(Ok(300), |text| text.parse())
        .expect("PROPTEST_CASES is a number")
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<usize>;
    prop_oneof![
        4 => (at(), 0u8..8).prop_map(|(at, bit)| Mutation::Flip { at, bit }),
        3 => (at(), any::<u8>()).prop_map(|(at, value)| Mutation::Byte { at, value }),
        8 => (at(), numbers()).prop_map(|(at, value)| Mutation::Number { at, value }),
        1 => (at(), at(), any::<u8>()).prop_map(|(at, length, value)| Mutation::Fill { at, length, value }),
        2 => (at(), at(), at()).prop_map(|(from, to, length)| Mutation::Copy { from, to, length }),
        1 => at().prop_map(|length| Mutation::Cut { length }),
        1 => (at(), any::<u8>()).prop_map(|(length, value)| Mutation::Grow { length, value }),
        1 => (at(), at()).prop_map(|(at, length)| Mutation::Remove { at, length }),
    ]
}

pub fn mutations() -> impl Strategy<Value = Vec<Mutation>> {
    prop::collection::vec(mutation(), 1..5)
}

pub fn apply(mutations: &[Mutation], file: &mut Vec<u8>, hot: &[Range<usize>]) {
    for mutation in mutations {
        mutation.apply(file, hot);
    }
}
