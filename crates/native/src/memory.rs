//! Memory images: what differs from a stack becomes a layer, a stack becomes a sparse file, and both are compared.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overlaybd::commit::{CommitOptions, LayerWriter};
use overlaybd::io::WriteAt;
use overlaybd::stack::Stack;
use overlaybd::Uuid;

use crate::failure::{About, Outcome};
use crate::interruptible::Cancel;
use crate::layers::Made;
use crate::open;
use crate::output::{Options, Output};
use crate::pages::{self, Change, Comparison, WINDOW};
use crate::pipeline;

/// Memory holds secrets: its files are for their owner alone.
const MODE: u32 = 0o600;
/// Zeros within data that are not worth a hole of their own.
const HOLE: usize = 4096;

/// See `pack_memory` of the module.
pub fn pack(
    image: &Path,
    parents: &[PathBuf],
    out: &Path,
    uuid: Option<Uuid>,
    page: u64,
    replace: bool,
    cancel: &Arc<Cancel>,
) -> Outcome<Made> {
    let comparison = Comparison::open(image, parents, page, cancel)?;
    let parent_uuid = comparison.parent_uuid();
    let options = CommitOptions {
        uuid: Some(uuid.unwrap_or_else(Uuid::new_v4)),
        parent_uuid,
        user_tag: Vec::new(),
        virtual_size: Some(comparison.size().next_multiple_of(512)),
        keep_zeroes: comparison.has_stack(),
    };
    let mut output = Output::create(
        out,
        Options {
            replace,
            mode: MODE,
            digest: true,
        },
        cancel,
    )?;
    let mut writer = LayerWriter::new(&mut output, options).about(out)?;
    comparison.run(|differences| {
        for run in &differences.runs {
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
    let data = pages::data_of(&stack).about(out)?;
    let output = Output::create(
        out,
        Options {
            replace,
            mode: MODE,
            digest: false,
        },
        cancel,
    )?;
    WriteAt::set_len(output.file(), stack.virtual_size()).about(out)?;
    let copy = Copy {
        stack: &stack,
        data: &data,
        out,
        file: output.file(),
    };
    let windows = pages::windows_of(&data, &[]);
    let mut written = 0;
    pipeline::in_order(
        windows.len(),
        || vec![0; WINDOW as usize],
        |buffer, number| copy.window(windows[number], buffer),
        |count| {
            written += count;
            Ok(())
        },
    )?;
    output.publish()?;
    Ok(written)
}

struct Copy<'a> {
    stack: &'a Stack,
    data: &'a [Range<u64>],
    out: &'a Path,
    file: &'a File,
}

impl Copy<'_> {
    /// Write what is not zero in one window; returns how many bytes that were.
    fn window(&self, offset: u64, buffer: &mut [u8]) -> Outcome<u64> {
        pages::fill(buffer, &(offset..offset + WINDOW), self.data, |part, at| {
            self.stack.read_at(part, at).about(self.out)
        })?;
        // Nothing behind the end of the device is data, so that no block reaches beyond it by more than zeros.
        let length = (self.stack.virtual_size() - offset).min(WINDOW) as usize;
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
