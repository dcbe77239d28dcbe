//! Laying sorted runs of records over each other. Pure computation: linear sweeps, no lookups.

use crate::record::Packed;

/// Merge levels, the lowest first: of each sector, the highest level that has a record decides. Each level must be sorted
/// and without overlaps; so is the result. Linear in the number of records, times the logarithm of that of levels.
pub(crate) fn merge(levels: &[&[Packed]]) -> Vec<Packed> {
    match levels {
        [] => Vec::new(),
        [only] => only.to_vec(),
        [lower, upper] => overlay(lower, upper),
        _ => {
            let (lower, upper) = levels.split_at(levels.len() / 2);
            overlay(&merge(lower), &merge(upper))
        }
    }
}

fn overlay(lower: &[Packed], upper: &[Packed]) -> Vec<Packed> {
    let mut merged = Vec::with_capacity(lower.len() + upper.len());
    let mut rest = lower;
    let mut done = 0;
    for above in upper {
        while let Some(below) = rest.first() {
            if below.lba() >= above.lba() {
                break;
            }
            if below.end() > done && above.lba() > done {
                merged.push(below.clip(done, above.lba()));
            }
            if below.end() > above.end() {
                break;
            }
            rest = &rest[1..];
        }
        while rest.first().is_some_and(|below| below.end() <= above.end()) {
            rest = &rest[1..];
        }
        merged.push(*above);
        done = above.end();
    }
    if let Some(below) = rest.first() {
        merged.push(below.clip(done, below.end()));
        merged.extend_from_slice(&rest[1..]);
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    type Run = (u64, u32, u64, bool, u8);

    fn level(runs: &[Run]) -> Vec<Packed> {
        runs.iter()
            .map(|run| Packed::new_unchecked(run.0, run.1, run.2, run.3, run.4))
            .collect()
    }

    fn runs(records: &[Packed]) -> Vec<Run> {
        records
            .iter()
            .map(|r| (r.lba(), r.length(), r.physical(), r.zeroed(), r.tag()))
            .collect()
    }

    #[test]
    fn stack_of_three_layers() {
        let base = level(&[(0, 32, 8, false, 0), (64, 16, 40, false, 0)]);
        let middle = level(&[(4, 4, 8, false, 1), (60, 8, 12, true, 1)]);
        let top = level(&[(6, 2, 8, false, 2), (70, 4, 10, false, 2)]);
        assert_eq!(
            runs(&merge(&[&base, &middle, &top])),
            [
                (0, 4, 8, false, 0),
                (4, 2, 8, false, 1),
                (6, 2, 8, false, 2),
                (8, 24, 16, false, 0),
                (60, 8, 12, true, 1),
                (68, 2, 44, false, 0),
                (70, 4, 10, false, 2),
                (74, 6, 50, false, 0),
            ]
        );
    }

    #[test]
    fn one_record_below_many() {
        let base = level(&[(0, 100, 8, false, 0)]);
        let top = level(&[
            (0, 1, 8, false, 1),
            (10, 5, 9, true, 1),
            (15, 5, 9, false, 1),
            (99, 3, 14, false, 1),
        ]);
        assert_eq!(
            runs(&merge(&[&base, &top])),
            [
                (0, 1, 8, false, 1),
                (1, 9, 9, false, 0),
                (10, 5, 9, true, 1),
                (15, 5, 9, false, 1),
                (20, 79, 28, false, 0),
                (99, 3, 14, false, 1),
            ]
        );
    }

    #[test]
    fn zeroed_runs_keep_their_place_when_cut() {
        let base = level(&[(0, 10, 77, true, 0)]);
        let top = level(&[(4, 2, 8, false, 1)]);
        assert_eq!(
            runs(&merge(&[&base, &top])),
            [
                (0, 4, 77, true, 0),
                (4, 2, 8, false, 1),
                (6, 4, 77, true, 0)
            ]
        );
    }

    #[test]
    fn nothing_changes_under_or_over_nothing() {
        let base = level(&[(3, 4, 8, false, 0)]);
        assert_eq!(runs(&merge(&[&base, &[]])), runs(&base));
        assert_eq!(runs(&merge(&[&[], &base])), runs(&base));
        assert_eq!(runs(&merge(&[&[], &base, &[], &[]])), runs(&base));
        assert!(merge(&[]).is_empty());
    }
}
