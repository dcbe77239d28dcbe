//! Finding a record by its LBA: a static tree of keys above the sorted records. It holds no records itself.

use crate::record::Packed;

/// Keys that are looked at together: two cache lines.
const WIDTH: usize = 16;

/// Every 16th key of the records, every 16th of those, and so on, until 16 or fewer are left.
pub(super) struct Fences {
    /// From the root down. Padded to whole nodes with keys that no LBA reaches.
    levels: Vec<Vec<[u64; WIDTH]>>,
}

impl Fences {
    pub(super) fn new(records: &[Packed]) -> Self {
        let mut levels = Vec::new();
        let mut keys: Vec<u64> = records
            .iter()
            .step_by(WIDTH)
            .map(|record| record.lba())
            .collect();
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

    /// The position of the last record that begins at or before `lba`.
    pub(super) fn predecessor(&self, records: &[Packed], lba: u64) -> Option<usize> {
        let mut position = 0;
        for level in &self.levels {
            let node = &level[position];
            let not_above: usize = node.iter().map(|key| usize::from(*key <= lba)).sum();
            // Only at the root can all keys lie above: a node's first key is what led to it.
            position = position * WIDTH + not_above.checked_sub(1)?;
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

fn nodes(keys: &[u64]) -> Vec<[u64; WIDTH]> {
    keys.chunks(WIDTH)
        .map(|chunk| {
            let mut node = [u64::MAX; WIDTH];
            node[..chunk.len()].copy_from_slice(chunk);
            node
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_linear_search_finds() {
        for count in [0, 1, 15, 16, 17, 255, 256, 257, 4096, 4097, 70_000_u64] {
            let records: Vec<Packed> = (0..count)
                .map(|n| Packed::new_unchecked(5 + n * 7, 3, 8, false, 0))
                .collect();
            let fences = Fences::new(&records);
            let step = if count > 5000 { 97 } else { 1 };
            for lba in (0..count * 7 + 20).step_by(step) {
                let expected = lba.checked_sub(5).and_then(|past| {
                    (count > 0).then(|| usize::try_from((past / 7).min(count - 1)).unwrap())
                });
                assert_eq!(
                    fences.predecessor(&records, lba),
                    expected,
                    "{count} records, lba {lba}"
                );
            }
        }
    }
}
