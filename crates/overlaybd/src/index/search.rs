//! Finding a record by its LBA: a static tree of keys above the sorted records. It holds no records itself.

use crate::record::Packed;

/// Keys that are looked at together: one cache line of the narrow ones.
const WIDTH: usize = 16;

/// Keys above the records, as narrow as they can be.
pub(super) enum Fences {
    /// For devices up to 2 TiB.
    Narrow(Tree<u32>),
    Wide(Tree<u64>),
}

/// Every 16th key of the records, every 16th of those, and so on, until 16 or fewer are left.
pub(super) struct Tree<K> {
    /// From the root down. The last node of a level is padded with a number that no search reaches.
    levels: Vec<Vec<[K; WIDTH]>>,
}

/// An LBA as it is kept in a tree.
pub(super) trait Key: Copy + Ord + TryFrom<u64> {
    const MAX: Self;
}

impl Key for u32 {
    const MAX: Self = Self::MAX;
}

impl Key for u64 {
    const MAX: Self = Self::MAX;
}

impl Fences {
    pub(super) fn new(records: &[Packed]) -> Self {
        let highest = records.last().map_or(0, |record| record.lba());
        if highest < u64::from(u32::MAX) {
            Self::Narrow(Tree::new(records))
        } else {
            Self::Wide(Tree::new(records))
        }
    }

    /// The position of the last record that begins at or before `lba`.
    pub(super) fn predecessor(&self, records: &[Packed], lba: u64) -> Option<usize> {
        match self {
            // No key is the highest number, so that the one below stands for all LBAs that are higher still.
            Self::Narrow(tree) => tree.predecessor(
                records,
                u32::try_from(lba).unwrap_or(u32::MAX).min(u32::MAX - 1),
                lba,
            ),
            Self::Wide(tree) => tree.predecessor(records, lba.min(u64::MAX - 1), lba),
        }
    }
}

impl<K: Key> Tree<K> {
    fn new(records: &[Packed]) -> Self {
        let key = |record: &Packed| K::try_from(record.lba()).unwrap_or(K::MAX);
        let mut levels = Vec::new();
        let mut keys: Vec<K> = records.iter().step_by(WIDTH).map(key).collect();
        while !keys.is_empty() {
            levels.push(nodes(&keys));
            if keys.len() <= WIDTH {
                break;
            }
            keys = keys.iter().step_by(WIDTH).copied().collect();
        }
        levels.reverse();
        Self { levels }
    }

    fn predecessor(&self, records: &[Packed], key: K, lba: u64) -> Option<usize> {
        let mut position = 0;
        for level in &self.levels {
            let node = &level[position];
            // Branches would be guesses; sixteen comparisons are a few instructions.
            let not_above: u32 = node.iter().map(|other| u32::from(*other <= key)).sum();
            // Only at the root can all keys lie above: a node's first key is what led to it.
            position = position * WIDTH + not_above.checked_sub(1)? as usize;
        }
        let from = position * WIDTH;
        let node = &records[from.min(records.len())..(from + WIDTH).min(records.len())];
        let not_above: usize = node
            .iter()
            .map(|record| usize::from(record.lba() <= lba))
            .sum();
        (from + not_above).checked_sub(1)
    }
}

fn nodes<K: Key>(keys: &[K]) -> Vec<[K; WIDTH]> {
    keys.chunks(WIDTH)
        .map(|chunk| {
            let mut node = [K::MAX; WIDTH];
            node[..chunk.len()].copy_from_slice(chunk);
            node
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finds_all(first: u64) {
        for count in [0, 1, 15, 16, 17, 255, 256, 257, 4096, 4097, 70_000_u64] {
            let records: Vec<Packed> = (0..count)
                .map(|n| Packed::new_unchecked(first + n * 7, 3, 8, false, 0))
                .collect();
            let fences = Fences::new(&records);
            let step = if count > 5000 { 97 } else { 1 };
            for lba in (0..count * 7 + 20).step_by(step).map(|lba| first - 5 + lba) {
                let expected = lba.checked_sub(first).and_then(|past| {
                    (count > 0).then(|| usize::try_from((past / 7).min(count - 1)).unwrap())
                });
                assert_eq!(
                    fences.predecessor(&records, lba),
                    expected,
                    "{count} records, lba {lba}"
                );
            }
            let last = (count > 0).then(|| count as usize - 1);
            assert_eq!(fences.predecessor(&records, u64::MAX), last);
        }
    }

    #[test]
    fn finds_what_a_linear_search_finds() {
        finds_all(5);
    }

    #[test]
    fn finds_beyond_two_tebibytes() {
        finds_all((1 << 32) - 20_000);
        finds_all((1 << 50) - 1_000_000);
    }
}
