//! Makes layers: from a raw image, from other layers, from an upper; plain, compressed, wrapped.

use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overlaybd::commit::{self, CommitOptions, Committed, Sink};
use overlaybd::io::WriteAt;
use overlaybd::zfile::{self, Algorithm};
use overlaybd::{tar, Uuid};

use crate::failure::{About, Failure, Outcome};
use crate::interruptible::Cancel;
use crate::open::{self, Source};
use crate::output::{Options, Output, Published};

/// Disk layers are as readable as the umask lets them be.
const MODE: u32 = 0o666;

/// What all calls that make a layer are told.
pub struct Form {
    pub zfile: Option<Algorithm>,
    pub tar: bool,
    pub uuid: Option<Uuid>,
    pub parent_uuid: Option<Uuid>,
    pub replace: bool,
}

/// A finished layer.
pub struct Made {
    pub committed: Committed,
    pub parent_uuid: Option<Uuid>,
    pub published: Published,
}

/// See `create_from_raw` of the module.
pub fn from_raw(source: &Path, out: &Path, form: &Form, cancel: &Arc<Cancel>) -> Outcome<Made> {
    let image = Source::open(source, cancel)?;
    let size = image.file().metadata().about(source)?.len();
    let extents = image.file().data_extents(0..size).about(source)?;
    let options = form.options(None, false);
    make(out, form, &options, cancel, |sink| {
        commit::from_raw(&image, extents, sink, options.clone())
    })
}

/// See `merge` of the module.
pub fn merge(layers: &[PathBuf], out: &Path, form: &Form, cancel: &Arc<Cancel>) -> Outcome<Made> {
    let lowers = open::lowers(layers, cancel)?;
    let Some(bottom) = lowers.layers().first() else {
        return Err(Failure::invalid("there are no layers to merge"));
    };
    let options = form.options(bottom.parent_uuid(), true);
    make(out, form, &options, cancel, |sink| {
        commit::merge(&lowers, sink, options.clone())
    })
}

/// See `commit` of the module.
pub fn commit_upper(
    data: &Path,
    index: Option<&Path>,
    out: &Path,
    form: &Form,
    cancel: &Arc<Cancel>,
) -> Outcome<Made> {
    let upper = open::upper(data, index, cancel)?;
    let options = form.options(upper.parent_uuid(), true);
    make(out, form, &options, cancel, |sink| {
        commit::commit_upper(&upper, sink, options.clone())
    })
}

impl Form {
    fn options(&self, inherited: Option<Uuid>, keep_zeroes: bool) -> CommitOptions {
        CommitOptions {
            uuid: Some(self.uuid.unwrap_or_else(Uuid::new_v4)),
            parent_uuid: self.parent_uuid.or(inherited),
            user_tag: Vec::new(),
            virtual_size: None,
            keep_zeroes,
        }
    }
}

fn make(
    out: &Path,
    form: &Form,
    options: &CommitOptions,
    cancel: &Arc<Cancel>,
    write: impl FnOnce(&mut dyn Sink) -> overlaybd::Result<Committed>,
) -> Outcome<Made> {
    let output = Output::create(
        out,
        Options {
            replace: form.replace,
            mode: MODE,
            digest: true,
        },
        cancel,
    )?;
    let (output, committed) = if form.tar {
        // The size of the layer comes first in an archive, so that its beginning is written last.
        let archive = tar::Writer::new(output.written_twice()).about(out)?;
        let (archive, committed) = compress(archive, form, write).about(out)?;
        (archive.finish().about(out)?, committed)
    } else if form.zfile.is_some() {
        compress(output.written_twice(), form, write).about(out)?
    } else {
        compress(output, form, write).about(out)?
    };
    Ok(Made {
        committed,
        parent_uuid: options.parent_uuid,
        published: output.publish()?,
    })
}

fn compress<W: Write + Seek>(
    mut sink: W,
    form: &Form,
    write: impl FnOnce(&mut dyn Sink) -> overlaybd::Result<Committed>,
) -> overlaybd::Result<(W, Committed)> {
    let Some(algorithm) = form.zfile else {
        let committed = write(&mut sink)?;
        return Ok((sink, committed));
    };
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(16);
    let options = zfile::Options {
        algorithm,
        threads,
        ..zfile::Options::default()
    };
    let mut writer = zfile::Writer::new(sink, options)?;
    let committed = write(&mut writer)?;
    let (sink, _) = writer.finish_with_header()?;
    Ok((sink, committed))
}
