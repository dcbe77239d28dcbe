//! Describes and verifies layer files. Reads only, also of files that are being written.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use overlaybd::header::{flags, Header, HEADER_BYTES};
use overlaybd::io::ReadAt;
use overlaybd::layer::Layer;
use overlaybd::probe::{verify_layer, Wrapper};
use overlaybd::upper::{Mode, Upper};
use overlaybd::zfile::{Algorithm, ZFile};
use overlaybd::{tar, Uuid};
use pyo3::prelude::*;

use crate::digest::hash_file;
use crate::failure::{About, Outcome};
use crate::interruptible::Cancel;
use crate::open::{self, Source};

/// Of a ZFile, see the module's contract.
#[derive(IntoPyObject)]
pub struct ZfileFacts {
    algorithm: &'static str,
    block_size: u32,
    blocks: u64,
    verified: bool,
    original_size: u64,
}

/// Of a layer or upper, see the module's contract.
#[derive(IntoPyObject)]
pub struct LayerFacts {
    variant: &'static str,
    wrapper: Vec<&'static str>,
    flags: u32,
    uuid: Option<String>,
    parent_uuid: Option<String>,
    virtual_size: u64,
    records: u64,
    zero_records: u64,
    data_bytes: u64,
    digest: String,
    size: u64,
    user_tag: String,
    zfile: Option<ZfileFacts>,
}

/// Of a layer that was read as a whole, see the module's contract.
#[derive(IntoPyObject)]
pub struct VerifiedLayer {
    records: u64,
    data_bytes: u64,
    bytes_read: u64,
    digest: String,
    size: u64,
}

/// See `inspect` of the module.
pub fn inspect(path: &Path, index: Option<&Path>, cancel: &Arc<Cancel>) -> Outcome<LayerFacts> {
    let source = Source::open(path, cancel)?;
    let mut facts = match writable(&source, path)? {
        Some(header) => of_upper(path, index, &header, cancel)?,
        None => of_layer(path, cancel)?,
    };
    facts.digest = hash_file(source.file(), cancel).about(path)?;
    facts.size = source.len().about(path)?;
    Ok(facts)
}

/// See `verify` of the module.
pub fn verify(path: &Path, cancel: &Arc<Cancel>) -> Outcome<VerifiedLayer> {
    let source = Arc::new(Source::open(path, cancel)?);
    let layer = verify_layer(source.clone()).about(path)?.layer;
    Ok(VerifiedLayer {
        records: layer.records() as u64,
        data_bytes: layer.data_bytes(),
        bytes_read: layer.source().len().about(path)?,
        digest: hash_file(source.file(), cancel).about(path)?,
        size: source.len().about(path)?,
    })
}

/// The header, if the file is the data of an upper that is not sealed.
fn writable(source: &Source, path: &Path) -> Outcome<Option<Header>> {
    let mut bytes = [0; HEADER_BYTES];
    if source.len().about(path)? < HEADER_BYTES as u64 {
        return Ok(None);
    }
    source.read_exact_at(&mut bytes, 0).about(path)?;
    let Ok(header) = Header::decode(&bytes) else {
        return Ok(None);
    };
    let open = header.has(flags::HEADER | flags::DATA) && !header.has(flags::SEALED);
    Ok((open && !Upper::is_sealed(source).about(path)?).then_some(header))
}

fn of_upper(
    path: &Path,
    index: Option<&Path>,
    header: &Header,
    cancel: &Arc<Cancel>,
) -> Outcome<LayerFacts> {
    let beside: PathBuf = path.with_extension("index");
    let index = index.unwrap_or(&beside);
    let sparse = header.has(flags::SPARSE);
    let upper = open::upper(path, (!sparse).then_some(index), cancel)?;
    Ok(LayerFacts {
        variant: match upper.mode() {
            Mode::Append => "append",
            Mode::Hybrid => "hybrid",
            Mode::Sparse => "sparse",
        },
        wrapper: Vec::new(),
        flags: header.flags,
        uuid: text_of(Some(upper.uuid())),
        parent_uuid: text_of(upper.parent_uuid()),
        virtual_size: upper.virtual_size(),
        records: upper.records() as u64,
        zero_records: upper.zero_records() as u64,
        data_bytes: upper.data_bytes(),
        digest: String::new(),
        size: 0,
        user_tag: String::from_utf8_lossy(&header.user_tag).into_owned(),
        zfile: None,
    })
}

fn of_layer(path: &Path, cancel: &Arc<Cancel>) -> Outcome<LayerFacts> {
    let opened = open::sealed_layer(path, cancel)?;
    let layer: &Layer = &opened.layer;
    let compressed = opened.wrappers.contains(&Wrapper::Zfile);
    Ok(LayerFacts {
        variant: layer.variant().name(),
        wrapper: opened
            .wrappers
            .iter()
            .map(|wrapper| wrapper.name())
            .collect(),
        flags: layer.flags(),
        uuid: text_of(Some(layer.uuid())),
        parent_uuid: text_of(layer.parent_uuid()),
        virtual_size: layer.virtual_size(),
        records: layer.records() as u64,
        zero_records: layer.zero_records() as u64,
        data_bytes: layer.data_bytes(),
        digest: String::new(),
        size: 0,
        user_tag: String::from_utf8_lossy(&layer.trailer().user_tag).into_owned(),
        zfile: compressed.then(|| zfile_facts(path, cancel)).transpose()?,
    })
}

fn zfile_facts(path: &Path, cancel: &Arc<Cancel>) -> Outcome<ZfileFacts> {
    let mut source: Arc<dyn ReadAt> = Arc::new(Source::open(path, cancel)?);
    if let Some(member) = tar::open(&source).about(path)? {
        source = Arc::new(member);
    }
    let zfile = ZFile::open(source).about(path)?;
    let header = zfile.header();
    Ok(ZfileFacts {
        algorithm: match header.algorithm {
            Algorithm::Lz4 => "lz4",
            Algorithm::Zstd => "zstd",
        },
        block_size: header.block_size,
        blocks: header.blocks,
        verified: header.verify,
        original_size: header.original_size,
    })
}

/// Lowercase; `None` for the nil UUID, which stands for none.
pub fn text_of(uuid: Option<Uuid>) -> Option<String> {
    uuid.filter(|uuid| !uuid.is_nil())
        .map(|uuid| uuid.to_string())
}
