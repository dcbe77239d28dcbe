//! Writing into an upper: data goes to the data file first, then its records to the index file and, in the same order,
//! into memory. Whether writing is allowed is the stack's.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::PoisonError;

use super::{bytes_of, Log, Mode, Upper};
use crate::index::{Piece, Place};
use crate::io::WriteAt;
use crate::record::{Packed, FIRST_DATA_SECTOR, MAX_WRITTEN_LENGTH, SECTOR};
use crate::Result;

/// Data that gets one record. Below the record's limit, and a multiple of 4 KiB.
const MAX_APPEND_BYTES: usize = 4 << 20;
/// Pieces that are looked up at a time.
const BATCH: usize = 16;
/// Zeroed records that are written at a time.
const ZERO_BATCH: usize = 4096;
static ZEROES: [u8; 65536] = [0; 65536];

impl Upper {
    /// Write whole sectors.
    pub(crate) fn write(&self, lba: u64, data: &[u8]) -> Result<()> {
        match self.mode {
            Mode::Append => self.append(lba, data),
            Mode::Hybrid => self.overwrite(lba, data),
            Mode::Sparse => {
                self.data
                    .0
                    .write_all_at(data, (lba + FIRST_DATA_SECTOR) * SECTOR)?;
                self.publish(
                    &records(lba, sectors(data), Some(lba + FIRST_DATA_SECTOR)),
                    &mut |_| {},
                )
            }
        }
    }

    /// Write what is there already to one new place, so that it becomes one run. The old places are not given back:
    /// someone may be reading them.
    pub(crate) fn write_again(&self, lba: u64, data: &[u8]) -> Result<()> {
        match self.mode {
            Mode::Append | Mode::Hybrid => self.append(lba, data),
            Mode::Sparse => self.write(lba, data),
        }
    }

    /// Make runs of whole sectors (first, count) read as zeros, whatever lies below.
    pub(crate) fn zero(&self, runs: &[(u64, u64)]) -> Result<()> {
        let mut batch = Vec::new();
        for &(lba, sectors) in runs {
            let end = lba + sectors;
            let mut position = lba;
            while position < end {
                let room = (ZERO_BATCH - batch.len()) as u64 * u64::from(MAX_WRITTEN_LENGTH);
                let length = (end - position).min(room);
                batch.extend(records(position, length, None));
                position += length;
                if batch.len() == ZERO_BATCH {
                    self.publish_zeroes(&batch)?;
                    batch.clear();
                }
            }
        }
        self.publish_zeroes(&batch)
    }

    fn publish_zeroes(&self, records: &[Unplaced]) -> Result<()> {
        let mut replaced = Vec::new();
        self.publish(records, &mut |range| push_fused(&mut replaced, range))?;
        // A log keeps what was overwritten, so that each of its earlier states can be found again after a crash.
        if self.mode != Mode::Append {
            for range in replaced {
                self.give_back(range)?;
            }
        }
        Ok(())
    }

    fn give_back(&self, sectors: Range<u64>) -> Result<()> {
        let range = bytes_of(sectors);
        let Err(error) = self.data.0.punch_hole(range.clone()) else {
            return Ok(());
        };
        if self.mode == Mode::Sparse {
            // Only what the file says will be known when it is opened again.
            return fill_with_zeroes(self.data.0.as_ref(), range);
        }
        match error.kind() {
            // The sectors read as zeros already; that their space is not free is no failure.
            std::io::ErrorKind::Unsupported | std::io::ErrorKind::StorageFull => Ok(()),
            _ => Err(error.into()),
        }
    }

    fn append(&self, lba: u64, data: &[u8]) -> Result<()> {
        let mut lba = lba;
        for part in data.chunks(MAX_APPEND_BYTES) {
            let length = sectors(part);
            let physical = self.allocated.fetch_add(length, Ordering::AcqRel);
            if let Err(error) = self.data.0.write_all_at(part, physical * SECTOR) {
                // Nobody refers to the place; take it back unless another write has got the next one.
                let _ = self.allocated.compare_exchange(
                    physical + length,
                    physical,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                return Err(error.into());
            }
            self.publish(&records(lba, length, Some(physical)), &mut |_| {})?;
            lba += length;
        }
        Ok(())
    }

    /// Overwrite in place what this upper holds already, append the rest.
    fn overwrite(&self, lba: u64, data: &[u8]) -> Result<()> {
        let mut lba = lba;
        let mut data = data;
        let mut pieces = [Piece {
            lba: 0,
            length: 0,
            place: Place::Hole,
        }; BATCH];
        while !data.is_empty() {
            let count = self.pieces(lba, sectors(data), &mut pieces);
            let mut rest = &pieces[..count];
            while let Some(first) = rest.first() {
                let (pieces, length) = same_target(rest);
                let (part, after) = data.split_at(length as usize * SECTOR as usize);
                match first.place {
                    Place::Data { physical, .. } => {
                        self.data.0.write_all_at(part, physical * SECTOR)?
                    }
                    Place::Hole | Place::Zero => self.append(lba, part)?,
                }
                lba += length;
                data = after;
                rest = &rest[pieces..];
            }
        }
        Ok(())
    }

    /// Append records to the index file and put them into the map.
    fn publish(&self, records: &[Unplaced], replaced: &mut dyn FnMut(Range<u64>)) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let mut log = self.lock_log();
        if let Some(index) = &self.index {
            let mut data_end = log.data_end;
            let mut bytes = Vec::with_capacity(records.len() * 16);
            for record in records {
                if let Some(physical) = record.physical {
                    data_end = data_end.max(physical + u64::from(record.length));
                }
                let physical = record.physical.unwrap_or(data_end);
                let zeroed = record.physical.is_none();
                let packed = Packed::new_unchecked(record.lba, record.length, physical, zeroed, 0);
                bytes.extend_from_slice(&packed.to_bytes());
            }
            log.append(index.as_ref(), &bytes)?;
            log.data_end = data_end;
        }
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        for record in records {
            map.insert(record.lba, record.length, record.physical, replaced);
        }
        Ok(())
    }
}

impl Log {
    fn append(&mut self, index: &dyn WriteAt, bytes: &[u8]) -> Result<()> {
        if self.torn {
            // Left there, a record of the failed write could come after newer ones when the log is read again.
            index.set_len(self.end)?;
            self.torn = false;
        }
        if let Err(error) = index.write_all_at(bytes, self.end) {
            self.torn = index.set_len(self.end).is_err();
            return Err(error.into());
        }
        self.end += bytes.len() as u64;
        Ok(())
    }
}

/// A record to be; a zeroed one has no place yet.
struct Unplaced {
    lba: u64,
    length: u32,
    physical: Option<u64>,
}

/// The records of one run of any length.
fn records(lba: u64, sectors: u64, physical: Option<u64>) -> Vec<Unplaced> {
    let step = MAX_WRITTEN_LENGTH as usize;
    (0..sectors)
        .step_by(step)
        .map(|from| Unplaced {
            lba: lba + from,
            length: (sectors - from).min(step as u64) as u32,
            physical: physical.map(|physical| physical + from),
        })
        .collect()
}

/// How many of the first pieces, and sectors, can be written at once: neighbours in the file, or all to be appended.
fn same_target(pieces: &[Piece]) -> (usize, u64) {
    let mut length = 0;
    let mut count = 0;
    for piece in pieces {
        let together = match (pieces[0].place, piece.place) {
            (
                Place::Data {
                    physical: first, ..
                },
                Place::Data { physical, .. },
            ) => first + length == physical,
            (Place::Data { .. }, _) | (_, Place::Data { .. }) => false,
            _ => true,
        };
        if !together {
            break;
        }
        length += piece.length;
        count += 1;
    }
    (count, length)
}

fn push_fused(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

fn fill_with_zeroes(file: &dyn WriteAt, range: Range<u64>) -> Result<()> {
    let mut position = range.start;
    while position < range.end {
        let length = (range.end - position).min(ZEROES.len() as u64);
        file.write_all_at(&ZEROES[..length as usize], position)?;
        position += length;
    }
    Ok(())
}

fn sectors(data: &[u8]) -> u64 {
    data.len() as u64 / SECTOR
}
