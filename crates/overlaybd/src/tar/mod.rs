//! The tar wrapper: a layer as the single member of an archive, so that registries and plain tar tools accept it.
//!
//! [`open`] finds the layer inside, [`Writer`] wraps one while it is written. Not a tar library: no other members, no
//! names, no rights.

mod block;
mod reader;
mod writer;

pub use reader::{open, Member};
pub use writer::{head, tail, Writer, HEAD_SIZE};

/// Bytes of a tar block.
const BLOCK_SIZE: usize = 512;
/// Bytes of the two zero blocks that end an archive.
const END_SIZE: u64 = 2 * BLOCK_SIZE as u64;

/// `size` bytes rounded up to whole blocks; `None` beyond 2^64.
fn padded(size: u64) -> Option<u64> {
    size.checked_next_multiple_of(BLOCK_SIZE as u64)
}
