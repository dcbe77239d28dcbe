//! Compares a memory image with a stack, page by page, reading only where one of them has data.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use overlaybd::io::{ReadAt, WriteAt};
use overlaybd::stack::{ExtentKind, Stack};

use crate::failure::{About, Failure, Outcome};
use crate::interruptible::Cancel;
use crate::open::{self, Source};
use crate::pipeline;

/// Bytes that are compared at once: the two sides together fit into a core's cache.
pub const WINDOW: u64 = 256 * 1024;
const SMALLEST_PAGE: u64 = 4096;
const LARGEST_PAGE: u64 = WINDOW;

/// How a run of pages differs from the stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It holds something else.
    Data,
    /// It is zero, and the stack is not.
    Zeroed,
}

/// A run of pages within a window.
#[derive(Clone)]
pub struct Run {
    /// Bytes within the window.
    pub range: Range<usize>,
    pub change: Change,
}

/// What differs in one window.
pub struct Differences {
    /// Where the window begins in the image, in bytes.
    pub offset: u64,
    /// Its bytes, fewer at the end of the image.
    pub length: usize,
    /// In order; neighbours of one kind are one run.
    pub runs: Vec<Run>,
    /// The window's bytes of the image, unchanged ones too.
    pub image: Vec<u8>,
}

/// An image, and the stack that it is compared with.
pub struct Comparison<'a> {
    image: Source,
    path: &'a Path,
    size: u64,
    image_data: Vec<Range<u64>>,
    stack: Option<Stack>,
    stack_size: u64,
    stack_data: Vec<Range<u64>>,
    stack_top: PathBuf,
    page: usize,
    windows: Vec<u64>,
    buffers: Mutex<Vec<Vec<u8>>>,
}

impl<'a> Comparison<'a> {
    /// Open both sides, and find out where there is data.
    pub fn open(
        path: &'a Path,
        stack: &[PathBuf],
        page: u64,
        cancel: &Arc<Cancel>,
    ) -> Outcome<Self> {
        if !page.is_power_of_two() || !(SMALLEST_PAGE..=LARGEST_PAGE).contains(&page) {
            return Err(Failure::invalid(format!(
                "a page has a power of two between {SMALLEST_PAGE} and {LARGEST_PAGE} bytes, not {page}"
            )));
        }
        let image = Source::open(path, cancel)?;
        let size = image.len().about(path)?;
        let image_data = image.file().data_extents(0..size).about(path)?;
        let mut comparison = Self {
            image,
            path,
            size,
            image_data,
            stack: None,
            stack_size: 0,
            stack_data: Vec::new(),
            stack_top: PathBuf::new(),
            page: page as usize,
            windows: Vec::new(),
            buffers: Mutex::new(Vec::new()),
        };
        if let Some(top) = stack.last() {
            comparison.stack_top.clone_from(top);
            let stack = open::stack(stack, cancel)?;
            comparison.stack_size = stack.virtual_size();
            comparison.stack_data = data_of(&stack).about(top)?;
            comparison.stack = Some(stack);
        }
        if comparison.stack_size > size.next_multiple_of(512) {
            return Err(Failure::invalid(format!(
                "{} has {size} bytes, fewer than the stack under it ({})",
                path.display(),
                comparison.stack_size
            )));
        }
        comparison.windows = windows_of(&comparison.image_data, &comparison.stack_data);
        Ok(comparison)
    }

    /// Bytes of the image.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Identity of the topmost layer of the stack, if there is one and it has one.
    pub fn parent_uuid(&self) -> Option<overlaybd::Uuid> {
        let lowers = self.stack.as_ref()?.lowers();
        lowers
            .layers()
            .last()
            .map(|layer| layer.uuid())
            .filter(|uuid| !uuid.is_nil())
    }

    /// Whether anything lies below.
    pub fn has_stack(&self) -> bool {
        self.stack.is_some()
    }

    /// Give what differs to `consume`, window by window in ascending order, by several threads.
    pub fn run(&self, mut consume: impl FnMut(&Differences) -> Outcome<()>) -> Outcome<()> {
        pipeline::in_order(
            self.windows.len(),
            || vec![0; WINDOW as usize],
            |below, number| self.compare(self.windows[number], below),
            |differences| {
                consume(&differences)?;
                self.keep(differences.image);
                Ok(())
            },
        )
    }

    fn keep(&self, buffer: Vec<u8>) {
        if let Ok(mut buffers) = self.buffers.lock() {
            buffers.push(buffer);
        }
    }

    fn compare(&self, offset: u64, below: &mut [u8]) -> Outcome<Differences> {
        let kept = self
            .buffers
            .lock()
            .ok()
            .and_then(|mut buffers| buffers.pop());
        let mut image = kept.unwrap_or_else(|| vec![0; WINDOW as usize]);
        let window = offset..offset + WINDOW;
        fill(&mut image, &window, &self.image_data, |buffer, at| {
            self.image.read_exact_at(buffer, at).about(self.path)
        })?;
        let mut anything_below = false;
        if let Some(stack) = &self.stack {
            anything_below = fill(below, &window, &self.stack_data, |buffer, at| {
                stack.read_at(buffer, at).about(&self.stack_top)
            })?;
        }
        let mut runs: Vec<Run> = Vec::new();
        let length = (self.size.next_multiple_of(512) - offset).min(WINDOW) as usize;
        for start in (0..length).step_by(self.page) {
            let range = start..(start + self.page).min(length);
            let page = &image[range.clone()];
            let zero = is_zero(page);
            let same = if anything_below {
                page == &below[range.clone()]
            } else {
                zero
            };
            if same {
                continue;
            }
            let change = if zero { Change::Zeroed } else { Change::Data };
            match runs.last_mut() {
                Some(run) if run.change == change && run.range.end == range.start => {
                    run.range.end = range.end;
                }
                _ => runs.push(Run { range, change }),
            }
        }
        Ok(Differences {
            offset,
            length,
            runs,
            image,
        })
    }
}

/// Where a stack stores data.
pub fn data_of(stack: &Stack) -> overlaybd::Result<Vec<Range<u64>>> {
    let extents = stack.extents(0..stack.virtual_size())?;
    let data = extents
        .iter()
        .filter(|extent| extent.kind == ExtentKind::Data);
    Ok(data
        .map(|extent| extent.offset..extent.offset + extent.length)
        .collect())
}

/// The windows, by their offsets, that any of the ranges meets.
pub fn windows_of(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<u64> {
    let mut windows: Vec<u64> = Vec::new();
    for ranges in [one, other] {
        let mut next = 0;
        for range in ranges {
            let mut window = (range.start - range.start % WINDOW).max(next);
            while window < range.end {
                windows.push(window);
                window += WINDOW;
            }
            next = window;
        }
    }
    windows.sort_unstable();
    windows.dedup();
    windows
}

/// Fill a buffer with a window, of which only the ranges are read; the rest is zeros. Returns whether any was read.
pub fn fill(
    buffer: &mut [u8],
    window: &Range<u64>,
    ranges: &[Range<u64>],
    read: impl Fn(&mut [u8], u64) -> Outcome<()>,
) -> Outcome<bool> {
    let first = ranges.partition_point(|range| range.end <= window.start);
    let mut filled = 0;
    for range in ranges[first..]
        .iter()
        .take_while(|range| range.start < window.end)
    {
        let start = (range.start.max(window.start) - window.start) as usize;
        let end = (range.end.min(window.end) - window.start) as usize;
        buffer[filled..start].fill(0);
        read(&mut buffer[start..end], window.start + start as u64)?;
        filled = end;
    }
    buffer[filled..].fill(0);
    Ok(filled > 0)
}

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Blocks of this size are compared without a branch inside, so that the compiler uses vector instructions.
    const BLOCK: usize = 256;
    let mut blocks = bytes.chunks_exact(BLOCK);
    blocks.all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
        && blocks.remainder().iter().all(|byte| *byte == 0)
}
