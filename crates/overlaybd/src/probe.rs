//! Finds out how a layer is wrapped and opens it: tar, ZFile, both or neither around an LSMT file.
//!
//! Each wrapper is removed at most once and in this order, as all implementations do; bytes are read, never names.

use std::io::ErrorKind;
use std::sync::Arc;

use crate::io::ReadAt;
use crate::layer::Layer;
use crate::zfile::{is_zfile, ZFile};
use crate::{tar, Error, Result};

/// What can be around a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrapper {
    Tar,
    Zfile,
}

impl Wrapper {
    /// `tar` or `zfile`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tar => "tar",
            Self::Zfile => "zfile",
        }
    }
}

/// A layer and what is around it.
pub struct Opened {
    pub layer: Layer,
    /// Outermost first.
    pub wrappers: Vec<Wrapper>,
}

/// Open a layer in whatever wrappers.
///
/// # Errors
/// [`Error::Format`] if no layer is inside or anything on the way to it is damaged, [`Error::Unsupported`] and
/// [`Error::Limit`] as the wrappers and [`Layer::open`] have it, [`Error::Io`].
pub fn open_layer(source: Arc<dyn ReadAt>) -> Result<Opened> {
    Chain::of(source)?.open()
}

/// Open a layer and check also what reading does not need: the end of the ZFile, and each of its blocks. Reads all bytes of a
/// ZFile; an LSMT file has no checksums of its own, only its digest tells whether its data is right.
///
/// # Errors
/// As [`open_layer`].
pub fn verify_layer(source: Arc<dyn ReadAt>) -> Result<Opened> {
    let chain = Chain::of(source)?;
    if let Some(zfile) = &chain.zfile {
        zfile.verify().map_err(as_format)?;
    }
    chain.open()
}

struct Chain {
    /// The LSMT file, or what should be one.
    inner: Arc<dyn ReadAt>,
    zfile: Option<Arc<ZFile>>,
    wrappers: Vec<Wrapper>,
}

impl Chain {
    fn of(source: Arc<dyn ReadAt>) -> Result<Self> {
        let mut inner = source;
        let mut wrappers = Vec::new();
        if let Some(member) = tar::open(&inner)? {
            inner = Arc::new(member);
            wrappers.push(Wrapper::Tar);
        }
        let mut zfile = None;
        if is_zfile(&*inner)? {
            let opened = Arc::new(ZFile::open(inner)?);
            inner = opened.clone();
            zfile = Some(opened);
            wrappers.push(Wrapper::Zfile);
        }
        Ok(Self {
            inner,
            zfile,
            wrappers,
        })
    }

    fn open(self) -> Result<Opened> {
        let layer = Layer::open(self.inner).map_err(as_format)?;
        Ok(Opened {
            layer,
            wrappers: self.wrappers,
        })
    }
}

/// Damaged blocks come through [`ReadAt`] as errors of the source, which is what they are for the layer inside.
fn as_format(error: Error) -> Error {
    match error {
        Error::Io(error) if error.kind() == ErrorKind::InvalidData => {
            Error::Format(error.to_string())
        }
        other => other,
    }
}
