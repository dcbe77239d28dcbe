//! Sealing an upper in place: index and trailer are appended to its data file, which is a layer from then on. In two
//! steps, since only the first needs writers to wait.

use std::sync::Arc;

use super::Upper;
use crate::header::{flags, Header, HEADER_BYTES};
use crate::io::ReadAt;
use crate::layer::{Layer, Variant, MAX_WRITTEN_RECORDS};
use crate::record::{Packed, RECORD_BYTES, SECTOR};
use crate::{Error, Result};

/// What the other writer of the format fills the last sector of such an index with.
const FILLER: u8 = 0xFF;

/// An upper with its index appended, and room for the trailer.
pub(crate) struct Seal {
    trailer: Header,
    trailer_offset: u64,
    records: Vec<Packed>,
}

impl Upper {
    /// Append the index and reserve the trailer's room. Nothing may write meanwhile, nor afterwards unless
    /// [`Upper::cancel_seal`] is called. After an error the upper is as it was.
    pub(crate) fn begin_seal(&self) -> Result<Seal> {
        let data_end = self.data_end();
        let records = self.with_map(|map| map.records(data_end));
        if records.len() > MAX_WRITTEN_RECORDS {
            return Err(Error::Limit(format!(
                "an upper of {} records cannot be sealed: a layer has at most {MAX_WRITTEN_RECORDS}",
                records.len()
            )));
        }
        let index_offset = data_end * SECTOR;
        let mut bytes = Vec::with_capacity(records.len() * RECORD_BYTES + 2 * HEADER_BYTES);
        for record in &records {
            bytes.extend_from_slice(&record.to_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), FILLER);
        let trailer_offset =
            (index_offset + bytes.len() as u64).next_multiple_of(HEADER_BYTES as u64);
        bytes.resize((trailer_offset - index_offset) as usize + HEADER_BYTES, 0);
        let written = self
            .data
            .0
            .set_len(index_offset)
            .and_then(|()| self.data.0.write_all_at(&bytes, index_offset));
        let seal = Seal {
            trailer: Header {
                flags: flags::DATA | flags::SEALED | self.mode.flag(),
                index_offset,
                index_size: records.len() as u64,
                virtual_size: self.virtual_size(),
                uuid: self.uuid,
                parent_uuid: self.parent_uuid,
                user_tag: self.user_tag.clone(),
            },
            trailer_offset,
            records,
        };
        match written {
            Ok(()) => Ok(seal),
            Err(error) => {
                self.cancel_seal(&seal);
                Err(error.into())
            }
        }
    }

    /// Make the upper writable again. Should the index not go away, it is data that nothing refers to.
    pub(crate) fn cancel_seal(&self, seal: &Seal) {
        let _ = self.data.0.set_len(seal.trailer.index_offset);
    }

    /// Write the trailer, once all before it is on stable storage, and sync it.
    pub(crate) fn finish_seal(&self, seal: &Seal) -> Result<()> {
        self.data.0.sync_data()?;
        self.data
            .0
            .write_all_at(&seal.trailer.encode()?, seal.trailer_offset)?;
        self.data.0.sync_data()?;
        Ok(())
    }

    /// The layer that a seal makes of the upper. It can be read before the seal is finished.
    pub(crate) fn sealed_layer(&self, seal: &Seal) -> Layer {
        let source: Arc<dyn ReadAt> = Arc::clone(&self.data) as Arc<dyn ReadAt>;
        Layer::new(
            source,
            seal.trailer.clone(),
            Variant::SealedInPlace,
            seal.records.clone(),
        )
    }
}
