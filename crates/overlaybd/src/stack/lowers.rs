//! The sealed layers of a stack under one merged index, made once and shared by all stacks on the same layers.

use std::sync::Arc;

use crate::index::{merge, Index};
use crate::layer::Layer;
use crate::record::Packed;
use crate::{Error, Result};

/// The most sealed layers that a stack can have.
pub const MAX_LAYERS: usize = 255;
/// The most records of all layers of a stack together.
const MAX_MERGED_RECORDS: usize = 128_000_000;

/// Sealed layers, bottom first, and their merged index.
pub struct Lowers {
    layers: Vec<Arc<Layer>>,
    index: Arc<Index>,
}

impl Lowers {
    /// Merge the indexes of layers, bottom first: of each sector, the topmost layer that has a record decides. Linear
    /// in the number of records. No layers at all are fine.
    ///
    /// # Errors
    /// [`Error::Limit`] for more than [`MAX_LAYERS`] layers or too many records.
    pub fn merge(layers: Vec<Arc<Layer>>) -> Result<Arc<Self>> {
        let index = match layers.as_slice() {
            // Its own index has tag 0, which is right for the layer at the bottom.
            [only] => Arc::clone(only.index()),
            _ => {
                check_limits(
                    layers.len(),
                    layers.iter().map(|layer| layer.records()).sum(),
                )?;
                let levels: Vec<Vec<Packed>> = layers
                    .iter()
                    .enumerate()
                    .map(|(number, layer)| tagged(layer, number))
                    .collect();
                let levels: Vec<&[Packed]> = levels.iter().map(Vec::as_slice).collect();
                Arc::new(Index::from_sorted(merge(&levels)))
            }
        };
        Ok(Arc::new(Self { layers, index }))
    }

    /// The same with one more layer on top.
    ///
    /// # Errors
    /// As [`Lowers::merge`].
    pub fn with_top(&self, layer: Arc<Layer>) -> Result<Arc<Self>> {
        if self.layers.is_empty() {
            return Self::merge(vec![layer]);
        }
        check_limits(self.layers.len() + 1, self.index.len() + layer.records())?;
        let top = tagged(&layer, self.layers.len());
        let index = Arc::new(Index::from_sorted(merge(&[self.index.packed(), &top])));
        let mut layers = self.layers.clone();
        layers.push(layer);
        Ok(Arc::new(Self { layers, index }))
    }

    /// The layers, bottom first.
    #[must_use]
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// The merged index; tags number the layers from 0 at the bottom.
    #[must_use]
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// Size of the device in bytes: that of the topmost layer that has one.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        let sizes = self.layers.iter().rev().map(|layer| layer.virtual_size());
        sizes.into_iter().find(|size| *size != 0).unwrap_or(0)
    }

    /// Check that each layer names the one below as its parent, as far as it names one.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the first pair that does not fit.
    pub fn verify_parents(&self) -> Result<()> {
        for pair in self.layers.windows(2) {
            let (below, above) = (pair[0].uuid(), pair[1].parent_uuid());
            if above.is_some_and(|parent| parent != below) {
                return Err(Error::Invalid(format!(
                    "layer {} was made on top of another layer than {below}",
                    pair[1].uuid()
                )));
            }
        }
        Ok(())
    }
}

/// A layer's records with its number. [`check_limits`] has seen the number.
fn tagged(layer: &Layer, number: usize) -> Vec<Packed> {
    layer
        .index()
        .packed()
        .iter()
        .map(|record| record.with_tag(number as u8))
        .collect()
}

fn check_limits(layers: usize, records: usize) -> Result<()> {
    if layers > MAX_LAYERS {
        return Err(Error::Limit(format!(
            "a stack of {layers} layers; at most {MAX_LAYERS}"
        )));
    }
    if records > MAX_MERGED_RECORDS {
        return Err(Error::Limit(format!(
            "a stack of {records} records; at most {MAX_MERGED_RECORDS}"
        )));
    }
    Ok(())
}
