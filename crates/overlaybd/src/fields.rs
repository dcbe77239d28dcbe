//! Little-endian numbers inside blocks of fixed size, for the modules that decode headers.
//!
//! Positions are constants of the format: they must lie inside the block, input never chooses them.

pub(crate) fn u32_at(block: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&block[at..at + 4]);
    u32::from_le_bytes(word)
}

pub(crate) fn u64_at(block: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&block[at..at + 8]);
    u64::from_le_bytes(word)
}
