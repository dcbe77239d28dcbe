//! Small layers and stacks to begin a test with.

use std::sync::Arc;

use overlaybd::commit::{CommitOptions, LayerWriter};
use overlaybd::stack::{Lowers, Stack};
use overlaybd::upper::Mode;
use overlaybd::Error;

use super::{layer, upper, Disk};

pub const SIZE: u64 = 1 << 20;
pub const BLOCK: u64 = 4096;

/// A layer with `fill` in one range of blocks.
pub fn base(blocks: std::ops::Range<u64>, fill: u8, virtual_size: u64) -> Vec<u8> {
    let mut output = Vec::new();
    let options = CommitOptions {
        virtual_size: Some(virtual_size),
        ..Default::default()
    };
    let mut writer = LayerWriter::new(&mut output, options).unwrap();
    writer
        .write(
            blocks.start * BLOCK,
            &vec![fill; ((blocks.end - blocks.start) * BLOCK) as usize],
        )
        .unwrap();
    writer.finish().unwrap();
    output
}

pub fn lowers(files: &[Vec<u8>]) -> Arc<Lowers> {
    Lowers::merge(
        files
            .iter()
            .map(|file| Arc::new(layer(file).unwrap()))
            .collect(),
    )
    .unwrap()
}

pub fn on_base(disk: &Disk, mode: Mode) -> Stack {
    Stack::open(
        lowers(&[base(8..16, 0xBA, SIZE)]),
        Some(upper(disk, mode, SIZE)),
    )
    .unwrap()
}

pub fn assert_invalid<T>(outcome: overlaybd::Result<T>) {
    match outcome {
        Err(Error::Invalid(_)) => {}
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("accepted"),
    }
}
