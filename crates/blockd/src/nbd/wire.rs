//! Numbers of the NBD protocol and the bytes of replies. Big-endian, as the protocol is.
//!
//! No I/O.

use std::io;

use crate::backend::BlockBackend;

/// First word of the server.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of the server, and first of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First word of every answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First word of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags.
pub const FIXED_NEWSTYLE: u16 = 1;
/// Handshake flag: no 124 zero bytes after an export by name.
pub const NO_ZEROES: u16 = 2;

/// Options of the handshake.
pub mod option {
    #![allow(missing_docs)]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Answers to options.
pub mod answer {
    #![allow(missing_docs)]
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const UNSUPPORTED: u32 = (1 << 31) | 1;
    pub const INVALID: u32 = (1 << 31) | 3;
    pub const UNKNOWN: u32 = (1 << 31) | 6;
    pub const TOO_BIG: u32 = (1 << 31) | 9;
}

/// Items of information about an export.
pub mod info {
    #![allow(missing_docs)]
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Commands of the transmission.
pub mod command {
    #![allow(missing_docs)]
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub mod command_flag {
    #![allow(missing_docs)]
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 2;
    pub const DONT_FRAGMENT: u16 = 4;
    pub const ONE_EXTENT: u16 = 8;
}

/// Flags of an export.
pub mod export_flag {
    #![allow(missing_docs)]
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Errors of commands.
pub mod errno {
    #![allow(missing_docs)]
    pub const PERM: u32 = 1;
    pub const IO: u32 = 5;
    pub const INVALID: u32 = 22;
    pub const NO_SPACE: u32 = 28;
    pub const UNSUPPORTED: u32 = 95;
}

/// Least size of a request, bytes.
pub const MINIMUM_BLOCK: u32 = 512;
/// Best least size of a request, bytes.
pub const PREFERRED_BLOCK: u32 = 4096;
/// Greatest payload of a request, bytes.
pub const MAXIMUM_PAYLOAD: u32 = 32 << 20;

/// Bytes of a request's header.
pub const REQUEST_SIZE: usize = 28;
/// Bytes of a simple reply's header.
pub const SIMPLE_REPLY_SIZE: usize = 16;
/// Bytes of a structured chunk's header.
pub const CHUNK_SIZE: usize = 20;

/// The only metadata context there is.
pub const ALLOCATION_CONTEXT: &str = "base:allocation";
/// The number that we give it.
pub const ALLOCATION_CONTEXT_ID: u32 = 1;

const CHUNK_DONE: u16 = 1;
const CHUNK_OFFSET_DATA: u16 = 1;
const CHUNK_BLOCK_STATUS: u16 = 5;
const CHUNK_ERROR: u16 = (1 << 15) | 1;

/// What the export can do.
#[must_use]
pub fn export_flags(backend: &dyn BlockBackend, structured_replies: bool) -> u16 {
    use export_flag as flag;
    let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::CAN_MULTI_CONN;
    if backend.is_read_only() {
        flags |= flag::READ_ONLY;
    } else {
        flags |= flag::SEND_TRIM | flag::SEND_WRITE_ZEROES;
    }
    if structured_replies {
        flags |= flag::SEND_DF;
    }
    flags
}

/// The number that tells a client what went wrong.
#[must_use]
pub fn error_number(error: &io::Error) -> u32 {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => errno::NO_SPACE,
        io::ErrorKind::InvalidInput => errno::INVALID,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => errno::PERM,
        io::ErrorKind::Unsupported => errno::UNSUPPORTED,
        _ => errno::IO,
    }
}

/// Header of a simple reply; `error` 0 is success.
#[must_use]
pub fn simple_reply(cookie: u64, error: u32) -> [u8; SIMPLE_REPLY_SIZE] {
    let mut bytes = [0; SIMPLE_REPLY_SIZE];
    bytes[0..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// Header of the only chunk of a successful structured read, up to the data.
#[must_use]
pub fn read_chunk(cookie: u64, offset: u64, length: u32) -> [u8; CHUNK_SIZE + 8] {
    let mut bytes = [0; CHUNK_SIZE + 8];
    chunk_header(&mut bytes, CHUNK_OFFSET_DATA, cookie, length + 8);
    bytes[CHUNK_SIZE..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// A structured reply that is an error and nothing else.
#[must_use]
pub fn error_chunk(cookie: u64, error: u32) -> [u8; CHUNK_SIZE + 6] {
    let mut bytes = [0; CHUNK_SIZE + 6];
    chunk_header(&mut bytes, CHUNK_ERROR, cookie, 6);
    bytes[CHUNK_SIZE..CHUNK_SIZE + 4].copy_from_slice(&error.to_be_bytes());
    bytes
}

/// A structured reply with the status of blocks: pairs of length (bytes) and flags.
#[must_use]
pub fn status_chunk(cookie: u64, extents: &[(u32, u32)]) -> Vec<u8> {
    let length = 4 + 8 * extents.len();
    let mut bytes = vec![0; CHUNK_SIZE];
    bytes.reserve(length);
    // Extents are counted in thousands at most, see the caller.
    #[allow(clippy::cast_possible_truncation)]
    chunk_header(&mut bytes, CHUNK_BLOCK_STATUS, cookie, length as u32);
    bytes.extend_from_slice(&ALLOCATION_CONTEXT_ID.to_be_bytes());
    for (length, flags) in extents {
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&flags.to_be_bytes());
    }
    bytes
}

fn chunk_header(bytes: &mut [u8], kind: u16, cookie: u64, length: u32) {
    bytes[0..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&CHUNK_DONE.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..20].copy_from_slice(&length.to_be_bytes());
}
