//! The upper's index in memory: an ordered map that changes with every write. It does no I/O and takes no locks.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::index::{Piece, Place};
use crate::record::{Packed, MAX_WRITTEN_LENGTH};

/// Where one run of sectors lies; its first sector is the key.
#[derive(Clone, Copy)]
struct Run {
    length: u32,
    /// `None` for a zeroed run.
    physical: Option<u64>,
}

impl Run {
    fn advance(self, sectors: u64) -> Option<u64> {
        self.physical.map(|physical| physical + sectors)
    }
}

/// Runs of sectors that do not overlap.
#[derive(Default)]
pub(super) struct Map {
    runs: BTreeMap<u64, Run>,
    data_sectors: u64,
}

impl Map {
    /// How many runs there are.
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// How many runs are zeroed. Linear.
    pub(super) fn zero_runs(&self) -> usize {
        let zeroed = self.runs.values().filter(|run| run.physical.is_none());
        zeroed.count()
    }

    /// Sectors that are stored.
    pub(super) fn data_sectors(&self) -> u64 {
        self.data_sectors
    }

    /// Put a run over whatever is there; `replaced` is told the physical sectors that nothing refers to any more.
    /// Neighbours that continue each other become one run.
    pub(super) fn insert(
        &mut self,
        lba: u64,
        length: u32,
        physical: Option<u64>,
        replaced: &mut dyn FnMut(Range<u64>),
    ) {
        let end = lba + u64::from(length);
        self.cut(lba, end, replaced);
        let mut first = lba;
        let mut run = Run { length, physical };
        if let Some((&before, &neighbour)) = self.runs.range(..lba).next_back() {
            if continues(before, neighbour, lba, run) {
                self.runs.remove(&before);
                first = before;
                run = Run {
                    length: neighbour.length + length,
                    physical: neighbour.physical,
                };
            }
        }
        if let Some(&neighbour) = self.runs.get(&end) {
            if continues(first, run, end, neighbour) {
                self.runs.remove(&end);
                run.length += neighbour.length;
            }
        }
        self.runs.insert(first, run);
        if physical.is_some() {
            self.data_sectors += u64::from(length);
        }
    }

    /// Remove `[lba, end)`, and keep what runs hold on either side.
    fn cut(&mut self, lba: u64, end: u64, replaced: &mut dyn FnMut(Range<u64>)) {
        let from = self
            .runs
            .range(..=lba)
            .next_back()
            .map_or(lba, |(&first, _)| first);
        while let Some((&first, &run)) = self
            .runs
            .range(from..end)
            .find(|(&first, run)| first + u64::from(run.length) > lba)
        {
            self.runs.remove(&first);
            let run_end = first + u64::from(run.length);
            if first < lba {
                self.runs.insert(
                    first,
                    Run {
                        length: (lba - first) as u32,
                        physical: run.physical,
                    },
                );
            }
            if run_end > end {
                let rest = Run {
                    length: (run_end - end) as u32,
                    physical: run.advance(end - first),
                };
                self.runs.insert(end, rest);
            }
            let removed = first.max(lba)..run_end.min(end);
            if let Some(physical) = run.advance(removed.start - first) {
                let sectors = removed.end - removed.start;
                self.data_sectors -= sectors;
                replaced(physical..physical + sectors);
            }
        }
    }

    /// The pieces that tile `sectors` sectors from `lba`, holes included. All data has tag 0.
    pub(super) fn pieces(&self, lba: u64, sectors: u64) -> impl Iterator<Item = Piece> + '_ {
        let end = lba.saturating_add(sectors);
        let from = self
            .runs
            .range(..=lba)
            .next_back()
            .map_or(lba, |(&first, _)| first);
        let mut runs = self.runs.range(from..end).peekable();
        let mut position = lba;
        std::iter::from_fn(move || {
            if position >= end {
                return None;
            }
            while runs
                .peek()
                .is_some_and(|(&first, run)| first + u64::from(run.length) <= position)
            {
                runs.next();
            }
            let start = position;
            let (until, place) = match runs.peek() {
                Some((&first, run)) if first <= start => {
                    let place = run
                        .advance(start - first)
                        .map_or(Place::Zero, |physical| Place::Data { tag: 0, physical });
                    (first + u64::from(run.length), place)
                }
                Some((&first, _)) => (first, Place::Hole),
                None => (end, Place::Hole),
            };
            position = until.min(end);
            Some(Piece {
                lba: start,
                length: position - start,
                place,
            })
        })
    }

    /// The first two or more runs from `lba` on, with gaps of at most `gap` sectors between them, that span at most
    /// `longest` sectors: the first of these sectors and their number.
    pub(super) fn fragments(&self, lba: u64, gap: u64, longest: u64) -> Option<(u64, u64)> {
        let mut group: Option<(u64, u64, usize)> = None;
        for (&first, run) in self.runs.range(lba..) {
            let end = first + u64::from(run.length);
            group = match group {
                Some((start, last, runs)) if first - last <= gap && end - start <= longest => {
                    Some((start, end, runs + 1))
                }
                Some((start, last, runs)) if runs > 1 => return Some((start, last - start)),
                _ => Some((first, end, 1)),
            };
        }
        group
            .filter(|(_, _, runs)| *runs > 1)
            .map(|(start, last, _)| (start, last - start))
    }

    /// All runs as records for an index in whose layer the data ends at sector `data_end`.
    pub(super) fn records(&self, data_end: u64) -> Vec<Packed> {
        self.runs
            .iter()
            .map(|(&lba, run)| {
                let physical = run.physical.unwrap_or(data_end);
                Packed::new_unchecked(lba, run.length, physical, run.physical.is_none(), 0)
            })
            .collect()
    }
}

/// Whether the second run can be appended to the first.
fn continues(lba: u64, run: Run, next_lba: u64, next: Run) -> bool {
    lba + u64::from(run.length) == next_lba
        && run.length + next.length <= MAX_WRITTEN_LENGTH
        && run.advance(u64::from(run.length)) == next.physical
}

#[cfg(test)]
mod tests {
    use super::*;

    type Expected = (u64, u32, Option<u64>);

    fn runs(map: &Map) -> Vec<Expected> {
        map.runs
            .iter()
            .map(|(&lba, run)| (lba, run.length, run.physical))
            .collect()
    }

    fn insert(map: &mut Map, lba: u64, length: u32, physical: Option<u64>) -> Vec<Range<u64>> {
        let mut replaced = Vec::new();
        map.insert(lba, length, physical, &mut |range| replaced.push(range));
        replaced
    }

    #[test]
    fn replay_of_a_log() {
        let mut map = Map::default();
        insert(&mut map, 0, 8, Some(8));
        insert(&mut map, 4, 8, Some(16));
        insert(&mut map, 2, 1, None);
        assert_eq!(insert(&mut map, 1, 3, Some(24)), [9..10, 11..12]);
        assert_eq!(
            runs(&map),
            [(0, 1, Some(8)), (1, 3, Some(24)), (4, 8, Some(16))]
        );
        assert_eq!(map.data_sectors(), 12);
    }

    #[test]
    fn a_run_is_split_by_one_inside() {
        let mut map = Map::default();
        insert(&mut map, 10, 10, Some(8));
        assert_eq!(
            insert(&mut map, 13, 2, None),
            vec![Range { start: 11, end: 13 }]
        );
        assert_eq!(
            runs(&map),
            [(10, 3, Some(8)), (13, 2, None), (15, 5, Some(13))]
        );
        assert_eq!(map.data_sectors(), 8);
    }

    #[test]
    fn neighbours_fuse_up_to_the_limit() {
        let mut map = Map::default();
        insert(&mut map, 0, 8, Some(8));
        insert(&mut map, 16, 8, Some(24));
        insert(&mut map, 8, 8, Some(16));
        assert_eq!(runs(&map), [(0, 24, Some(8))]);
        insert(&mut map, 24, MAX_WRITTEN_LENGTH - 24, Some(32));
        assert_eq!(map.len(), 1);
        insert(
            &mut map,
            u64::from(MAX_WRITTEN_LENGTH),
            8,
            Some(8 + u64::from(MAX_WRITTEN_LENGTH)),
        );
        assert_eq!(map.len(), 2);
        insert(&mut map, 50_000, 4, None);
        insert(&mut map, 50_004, 4, None);
        assert_eq!(map.len(), 3);
    }
}
