//! The sealed layers of a stack under one merged index, made once and shared by all stacks on the same layers.

use std::sync::Arc;

use crate::index::Index;
use crate::layer::Layer;
use crate::Result;

/// The most sealed layers that a stack can have.
pub const MAX_LAYERS: usize = 255;

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
    /// [`crate::Error::Limit`] for more than [`MAX_LAYERS`] layers or too many records.
    pub fn merge(layers: Vec<Arc<Layer>>) -> Result<Arc<Self>> {
        let _ = layers;
        todo!()
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
        todo!()
    }

    /// Check that each layer names the one below as its parent, as far as it names one.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] names the first pair that does not fit.
    pub fn verify_parents(&self) -> Result<()> {
        todo!()
    }
}
