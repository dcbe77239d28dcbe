//! The header and trailer of a layer file, which share one structure. Bytes only: who may be sealed when is not decided
//! here.

use uuid::Uuid;

use crate::{Error, Result};

/// Bytes that a header or trailer takes in a file.
pub const HEADER_BYTES: usize = 4096;
/// Bytes of the user's tag.
pub const USER_TAG_BYTES: usize = 256;

const MAGIC: [u8; 24] = [
    0x4C, 0x53, 0x4D, 0x54, 0x00, 0x01, 0x02, 0x00, 0x65, 0x7E, 0x63, 0xD2, 0x94, 0x44, 0x08, 0x4C,
    0xA2, 0xD2, 0xC8, 0xEC, 0x4F, 0xCF, 0xAE, 0x8A,
];
const STRUCT_BYTES: u32 = 390;
const SIZE_AT: usize = 24;
const FLAGS_AT: usize = 28;
const INDEX_OFFSET_AT: usize = 32;
const INDEX_SIZE_AT: usize = 40;
pub(crate) const VIRTUAL_SIZE_AT: usize = 48;
const UUID_AT: usize = 56;
pub(crate) const PARENT_UUID_AT: usize = 93;
pub(crate) const UUID_BYTES: usize = 37;
const VERSION_AT: usize = 132;
const SUB_VERSION_AT: usize = 133;
const USER_TAG_AT: usize = 134;

/// The bits of [`Header::flags`].
pub mod flags {
    /// Set in a header, clear in a trailer.
    pub const HEADER: u32 = 1;
    /// Set in a file with data, clear in an index file.
    pub const DATA: u32 = 1 << 1;
    /// The file is complete and does not change any more.
    pub const SEALED: u32 = 1 << 2;
    /// A writable layer whose data lies at the place that the LBA tells.
    pub const SPARSE: u32 = 1 << 4;
    /// A writable layer that overwrites its own data in place. Others use the bit differently: never reject it alone.
    pub const HYBRID: u32 = 1 << 5;
}

/// What a header or trailer says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Bits of [`flags`]; unknown ones are kept when read.
    pub flags: u32,
    /// Where the index begins, in bytes. 0 in the header of a data file, 4096 in that of an index file.
    pub index_offset: u64,
    /// How many records the index has, padding included. 0 in every header.
    pub index_size: u64,
    /// Size of the device, in bytes; 0 means that of the layer below.
    pub virtual_size: u64,
    /// Identity of the layer; nil when it has none.
    pub uuid: Uuid,
    /// The layer that this one was made on top of.
    pub parent_uuid: Option<Uuid>,
    /// Free text, at most 256 bytes, without the zeros at its end.
    pub user_tag: Vec<u8>,
}

impl Header {
    /// The 4096 bytes of the header in a file.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the user's tag is too long.
    pub fn encode(&self) -> Result<[u8; HEADER_BYTES]> {
        if self.user_tag.len() > USER_TAG_BYTES {
            return Err(Error::Invalid(format!(
                "a user tag has at most {USER_TAG_BYTES} bytes, not {}",
                self.user_tag.len()
            )));
        }
        let mut bytes = [0; HEADER_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        put(&mut bytes, SIZE_AT, &STRUCT_BYTES.to_le_bytes());
        put(&mut bytes, FLAGS_AT, &self.flags.to_le_bytes());
        put(
            &mut bytes,
            INDEX_OFFSET_AT,
            &self.index_offset.to_le_bytes(),
        );
        put(&mut bytes, INDEX_SIZE_AT, &self.index_size.to_le_bytes());
        put(
            &mut bytes,
            VIRTUAL_SIZE_AT,
            &self.virtual_size.to_le_bytes(),
        );
        put(&mut bytes, UUID_AT, &uuid_text(Some(self.uuid)));
        put(&mut bytes, PARENT_UUID_AT, &uuid_text(self.parent_uuid));
        bytes[VERSION_AT] = 1;
        bytes[SUB_VERSION_AT] = 1;
        put(&mut bytes, USER_TAG_AT, &self.user_tag);
        Ok(bytes)
    }

    /// Read a header or trailer.
    ///
    /// # Errors
    /// [`Error::Format`] when it does not begin as one, or contradicts itself.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self> {
        if bytes[..MAGIC.len()] != MAGIC {
            return Err(Error::Format(
                "an LSMT header or trailer begins with other bytes".into(),
            ));
        }
        let flags = u32_at(bytes, FLAGS_AT);
        if flags & flags::SPARSE != 0 && flags & flags::HYBRID != 0 {
            return Err(Error::Format(
                "a layer cannot be both sparse and hybrid".into(),
            ));
        }
        let tag = &bytes[USER_TAG_AT..USER_TAG_AT + USER_TAG_BYTES];
        let used = tag
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |last| last + 1);
        Ok(Self {
            flags,
            index_offset: u64_at(bytes, INDEX_OFFSET_AT),
            index_size: u64_at(bytes, INDEX_SIZE_AT),
            virtual_size: u64_at(bytes, VIRTUAL_SIZE_AT),
            uuid: parse_uuid(&bytes[UUID_AT..UUID_AT + UUID_BYTES]).unwrap_or_default(),
            parent_uuid: parse_uuid(&bytes[PARENT_UUID_AT..PARENT_UUID_AT + UUID_BYTES]),
            user_tag: tag[..used].to_vec(),
        })
    }

    /// Whether all of `bits` are set.
    #[must_use]
    pub fn has(&self, bits: u32) -> bool {
        self.flags & bits == bits
    }
}

/// The text form in its field; no UUID is all zero bytes.
pub(crate) fn uuid_text(uuid: Option<Uuid>) -> [u8; UUID_BYTES] {
    let mut text = [0; UUID_BYTES];
    if let Some(uuid) = uuid {
        uuid.hyphenated().encode_lower(&mut text[..UUID_BYTES - 1]);
    }
    text
}

/// Either case of text; zero bytes, the nil UUID, and what is no UUID at all are none.
fn parse_uuid(field: &[u8]) -> Option<Uuid> {
    let text = field.split(|byte| *byte == 0).next()?;
    Uuid::try_parse_ascii(text)
        .ok()
        .filter(|uuid| !uuid.is_nil())
}

fn put(bytes: &mut [u8; HEADER_BYTES], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(value)
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}
