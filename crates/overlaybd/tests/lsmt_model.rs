//! Random operations on devices of all kinds against a plain byte array: restacks, merges, reopens, full disks, crashes.

mod lsmt_support;

use lsmt_support::world::{Op, World};
use lsmt_support::Random;
use overlaybd::upper::Mode;
use proptest::prelude::*;

fn walk(modes: &[Mode], seeds: std::ops::Range<u64>, operations: usize) {
    for seed in seeds {
        let mut random = Random(seed);
        let mut world = World::new(modes, 512, true);
        for number in 0..operations {
            let op = World::random_op(&mut random);
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.apply(&op)));
            assert!(outcome.is_ok(), "seed {seed}, operation {number}: {op:?}");
        }
        world.verify_commits();
    }
}

#[test]
fn append() {
    walk(&[Mode::Append], 0..8, 150);
}

#[test]
fn hybrid() {
    walk(&[Mode::Hybrid], 1000..1008, 150);
}

#[test]
fn sparse() {
    walk(&[Mode::Sparse], 2000..2008, 150);
}

#[test]
fn mixed() {
    walk(&[Mode::Hybrid, Mode::Append, Mode::Sparse], 3000..3008, 150);
}

fn any_op() -> impl Strategy<Value = Op> {
    let at = || 0..512_u64;
    let length = || prop_oneof![4 => 0..20_u64, 1 => 0..200_u64];
    prop_oneof![
        8 => (at(), length(), any::<u8>()).prop_map(|(at, length, fill)| Op::Write { at, length, fill }),
        4 => (at(), length()).prop_map(|(at, length)| Op::Discard { at, length }),
        1 => Just(Op::Flush),
        1 => any::<u8>().prop_map(|mode| Op::Restack { mode }),
        1 => (any::<u64>(), any::<u64>()).prop_map(|(first, count)| Op::Merge { first, count }),
        1 => Just(Op::Reopen),
        1 => (0..64_u64).prop_map(|by| Op::Resize { by }),
        1 => (at(), length(), any::<u8>(), 0..30_000_u64)
            .prop_map(|(at, length, fill, free)| Op::WriteOnFullDisk { at, length, fill, free }),
        1 => (0..9_000_u64).prop_map(|free| Op::RestackOnFullDisk { free }),
        1 => (any::<u64>(), any::<bool>()).prop_map(|(at, torn)| Op::Crash { at, torn }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_operations(operations in prop::collection::vec(any_op(), 1..40), mode in 0..3_usize) {
        let modes = [Mode::Append, Mode::Hybrid, Mode::Sparse];
        let mut world = World::new(&modes[mode..=mode], 512, true);
        for op in &operations {
            world.apply(op);
        }
        world.verify_commits();
    }
}
