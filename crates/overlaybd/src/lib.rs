//! The overlaybd layer format: LSMT layers and stacks, ZFile compression, tar wrapper.
//!
//! A library without I/O policy: bytes come and go through the traits of [`io`], which the caller implements or takes
//! from there for plain files. Nothing here opens paths, starts threads (but for compression, where the caller asks) or
//! decides when data must be durable, except where the format's crash rules demand an order. It must not know of devices,
//! exports or sandboxes.

pub mod checksum;
pub mod commit;
pub mod error;
mod fields;
pub mod header;
pub mod index;
pub mod io;
pub mod layer;
pub mod probe;
pub mod record;
pub mod stack;
pub mod tar;
pub mod trace;
pub mod upper;
pub mod zfile;

pub use error::{Error, Result};
pub use uuid::Uuid;
