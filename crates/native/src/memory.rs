//! Memory images: what differs from a stack becomes a layer, a stack becomes a sparse file, and both are compared.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overlaybd::commit::{CommitOptions, LayerWriter};
use overlaybd::io::{ReadAt, WriteAt};
use overlaybd::stack::Stack;
use overlaybd::Uuid;

use crate::failure::{About, Failure, Outcome};
use crate::interruptible::Cancel;
use crate::layers::Made;
use crate::open::{self, Source};
use crate::output::{Options, Output};
use crate::pages::{self, Change, Comparison, Differences, Run, WINDOW};
use crate::pipeline;

/// Memory holds secrets: its files are for their owner alone.
const MODE: u32 = 0o600;
/// Zeros within data that are not worth a hole of their own.
const HOLE: usize = 4096;

/// What `pack_memory` of the module is told.
pub struct Packing {
    pub uuid: Option<Uuid>,
    pub page: u64,
    /// Runs after which short gaps between runs are stored as well.
    pub dense_after: u64,
    pub replace: bool,
}

/// See `pack_memory` of the module.
pub fn pack(
    image: &Path,
    parents: &[PathBuf],
    out: &Path,
    packing: &Packing,
    cancel: &Arc<Cancel>,
) -> Outcome<Made> {
    let comparison = Comparison::open(image, parents, packing.page, cancel)?;
    let parent_uuid = comparison.parent_uuid();
    let options = CommitOptions {
        uuid: Some(packing.uuid.unwrap_or_else(Uuid::new_v4)),
        parent_uuid,
        user_tag: Vec::new(),
        virtual_size: Some(comparison.size().next_multiple_of(512)),
        keep_zeroes: comparison.has_stack(),
    };
    let output_options = Options {
        replace: packing.replace,
        mode: MODE,
        digest: true,
    };
    let mut output = Output::create(out, output_options, cancel)?;
    let mut writer = LayerWriter::new(&mut output, options).about(out)?;
    let mut count = 0;
    comparison.run(|differences| {
        let gap = stored_gap(count, packing.dense_after);
        for run in joined(differences, gap) {
            count += 1;
            let offset = differences.offset + run.range.start as u64;
            match run.change {
                Change::Data => writer.write(offset, &differences.image[run.range.clone()]),
                Change::Zeroed => writer.write_zeroes(offset, run.range.len() as u64),
            }
            .about(out)?;
        }
        Ok(())
    })?;
    let committed = writer.finish().about(out)?;
    Ok(Made {
        committed,
        parent_uuid,
        published: output.publish()?,
    })
}

/// How many unchanged bytes between two runs are stored to save a record: other implementations refuse layers of more
/// than a million. None at first; in the end windows are stored as a whole, whose records fuse.
fn stored_gap(runs: u64, dense_after: u64) -> usize {
    match runs {
        runs if runs < dense_after => 0,
        runs if runs < dense_after + dense_after / 4 => 64 * 1024,
        _ => WINDOW as usize,
    }
}

/// The runs of a window, those that are no more than `gap` bytes apart as one run of data.
fn joined(differences: &Differences, gap: usize) -> Vec<Run> {
    let runs = &differences.runs;
    if gap >= WINDOW as usize && !runs.is_empty() {
        return vec![Run {
            range: 0..differences.length,
            change: Change::Data,
        }];
    }
    let mut joined: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        match joined.last_mut() {
            Some(last) if gap > 0 && run.range.start - last.range.end <= gap => {
                last.range.end = run.range.end;
                last.change = Change::Data;
            }
            _ => joined.push(run.clone()),
        }
    }
    joined
}

/// See `compare` of the module.
pub fn compare(
    image: &Path,
    stack: &[PathBuf],
    page: u64,
    cancel: &Arc<Cancel>,
) -> Outcome<Vec<(u64, u64)>> {
    let comparison = Comparison::open(image, stack, page, cancel)?;
    let mut found: Vec<(u64, u64)> = Vec::new();
    comparison.run(|differences| {
        for run in &differences.runs {
            let offset = differences.offset + run.range.start as u64;
            let end = (differences.offset + run.range.end as u64).min(comparison.size());
            match found.last_mut() {
                Some((start, length)) if *start + *length == offset => *length = end - *start,
                _ => found.push((offset, end - offset)),
            }
        }
        Ok(())
    })?;
    Ok(found)
}

/// See `unpack` of the module.
pub fn unpack(paths: &[PathBuf], out: &Path, replace: bool, cancel: &Arc<Cancel>) -> Outcome<u64> {
    let stack = open::stack(paths, cancel)?;
    let output = Output::create(out, sparse(replace), cancel)?;
    WriteAt::set_len(output.file(), stack.virtual_size()).about(out)?;
    let written = copy_stack(&stack, out, output.file())?;
    output.publish()?;
    Ok(written)
}

/// See `fill` of the module.
pub fn fill(paths: &[PathBuf], image: &Path, cancel: &Arc<Cancel>) -> Outcome<u64> {
    let stack = open::stack(paths, cancel)?;
    let file = open_hole(image, stack.virtual_size())?;
    copy_stack(&stack, image, &file)
}

/// See `fill_from_image` of the module.
pub fn fill_from_image(image: &Path, out: &Path, cancel: &Arc<Cancel>) -> Outcome<u64> {
    let source = Source::open(image, cancel)?;
    let file = open_hole(out, source.len().about(image)?)?;
    copy_source(&source, image, out, &file)
}

/// See `copy_image` of the module.
pub fn copy_image(image: &Path, out: &Path, replace: bool, cancel: &Arc<Cancel>) -> Outcome<u64> {
    let source = Source::open(image, cancel)?;
    let output = Output::create(out, sparse(replace), cancel)?;
    WriteAt::set_len(output.file(), source.len().about(image)?).about(out)?;
    let written = copy_source(&source, image, out, output.file())?;
    output.publish()?;
    Ok(written)
}

/// Open a file for writing that is all hole, and of this size.
fn open_hole(path: &Path, size: u64) -> Outcome<File> {
    let file = File::options().write(true).open(path).about(path)?;
    let found = file.metadata().about(path)?;
    if !found.is_file() || found.blocks() != 0 || found.len() != size {
        return Err(Failure::invalid(format!(
            "{} is no empty sparse file of {size} bytes",
            path.display()
        )));
    }
    Ok(file)
}

/// Write what is not zero in an image to a file that is all holes; returns how many bytes that were.
fn copy_source(source: &Source, image: &Path, out: &Path, file: &File) -> Outcome<u64> {
    let size = source.len().about(image)?;
    Copy {
        read: |part: &mut [u8], at| source.read_exact_at(part, at).about(image),
        size,
        data: &source.file().data_extents(0..size).about(image)?,
        out,
        file,
    }
    .all()
}

fn sparse(replace: bool) -> Options {
    Options {
        replace,
        mode: MODE,
        digest: false,
    }
}

/// Write what is not zero in a stack to a file that is all holes; returns how many bytes that were.
fn copy_stack(stack: &Stack, out: &Path, file: &File) -> Outcome<u64> {
    Copy {
        read: |part: &mut [u8], at| stack.read_at(part, at).about(out),
        size: stack.virtual_size(),
        data: &pages::data_of(stack).about(out)?,
        out,
        file,
    }
    .all()
}

struct Copy<'a, R> {
    read: R,
    /// Of what is read, in bytes.
    size: u64,
    data: &'a [Range<u64>],
    out: &'a Path,
    file: &'a File,
}

impl<R: Fn(&mut [u8], u64) -> Outcome<()> + Sync> Copy<'_, R> {
    /// Write what is not zero; returns how many bytes that were.
    fn all(&self) -> Outcome<u64> {
        let windows = pages::windows_of(self.data, &[]);
        let mut written = 0;
        pipeline::in_order(
            windows.len(),
            || vec![0; WINDOW as usize],
            |buffer, number| self.window(windows[number], buffer),
            |count| {
                written += count;
                Ok(())
            },
        )?;
        Ok(written)
    }

    /// Write what is not zero in one window; returns how many bytes that were.
    fn window(&self, offset: u64, buffer: &mut [u8]) -> Outcome<u64> {
        pages::fill(buffer, &(offset..offset + WINDOW), self.data, &self.read)?;
        // Nothing behind the end of the device is data, so that no block reaches beyond it by more than zeros.
        let length = (self.size - offset).min(WINDOW) as usize;
        let mut written = 0;
        let mut start = 0;
        while start < length {
            let block = |at: usize| at..(at + HOLE).min(length);
            if pages::is_zero(&buffer[block(start)]) {
                start += HOLE;
                continue;
            }
            let mut end = block(start).end;
            while end < length && !pages::is_zero(&buffer[block(end)]) {
                end = block(end).end;
            }
            FileExt::write_all_at(self.file, &buffer[start..end], offset + start as u64)
                .about(self.out)?;
            written += (end - start) as u64;
            start = end;
        }
        Ok(written)
    }
}
