//! The CRC-32C variants of the format: "raw" (no final inversion, any initial state) for ZFile and for the traces of one
//! implementation, standard for the traces of the other.
//!
//! Only arithmetic; which bytes a checksum covers is decided where it is used.

/// Initial state of the checksum behind each ZFile block.
pub const BLOCK_SALT: u32 = 100_007;

/// CRC-32C of `data` continued from `state`, without the inversions before and after that the standard form has.
///
/// The result is the state to continue from, so that `raw(raw(s, a), b) == raw(s, a ++ b)`.
#[must_use]
pub fn raw(state: u32, data: &[u8]) -> u32 {
    !crc32c::crc32c_append(!state, data)
}

/// Standard CRC-32C of `data`, continued from the checksum of the bytes before it (0 at the start).
#[must_use]
pub fn standard(previous: u32, data: &[u8]) -> u32 {
    crc32c::crc32c_append(previous, data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_values_of_the_format() {
        assert_eq!(raw(0, b"123456789"), 0x58E3_FA20);
        assert_eq!(raw(BLOCK_SALT, b"123456789"), 0x3C9B_D4E0);
        assert_eq!(standard(0, b"123456789"), 0xE306_9283);
    }

    #[test]
    fn both_can_be_continued() {
        assert_eq!(raw(raw(7, b"12345"), b"6789"), raw(7, b"123456789"));
        assert_eq!(
            standard(standard(0, b"12345"), b"6789"),
            standard(0, b"123456789")
        );
    }
}
