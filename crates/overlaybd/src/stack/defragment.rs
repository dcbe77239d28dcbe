//! Bringing an upper with too many records below the limit of a layer, so that it can be sealed: neighbouring runs are
//! written again as one. What the device reads does not change.

use std::sync::PoisonError;

use super::{Stack, State};
use crate::record::SECTOR;
use crate::upper::Upper;
use crate::Result;

/// Sectors that are written as one at most.
const GROUP_SECTORS: u64 = 2048;
/// Gaps between runs, in sectors, that are copied up from below to join them; the next when the one before did not do.
const GAPS: [u64; 5] = [0, 8, 64, 512, GROUP_SECTORS];
/// Groups that are joined while writers wait.
const BATCH: usize = 16;

impl Stack {
    /// Join runs of the upper until it has at most 7/8 of `limit` records, if it has more than `limit`; or until there is
    /// nothing more to join. Writers wait a few milliseconds at a time. The upper must be that of the state.
    pub(super) fn defragment(&self, state: &State, upper: &Upper, limit: usize) -> Result<()> {
        if upper.records() <= limit {
            return Ok(());
        }
        let target = limit / 8 * 7;
        for gap in GAPS {
            let mut position = 0;
            'pass: loop {
                let _closed = self.gate.write().unwrap_or_else(PoisonError::into_inner);
                for _ in 0..BATCH {
                    if upper.records() <= target {
                        return Ok(());
                    }
                    let Some((lba, sectors)) = upper.fragments(position, gap, GROUP_SECTORS) else {
                        break 'pass;
                    };
                    let mut content = vec![0; (sectors * SECTOR) as usize];
                    state.view().read(&mut content, lba)?;
                    upper.write_again(lba, &content)?;
                    position = lba + sectors;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Arc;

    use super::*;
    use crate::commit::{CommitOptions, LayerWriter};
    use crate::io::WriteAt;
    use crate::layer::Layer;
    use crate::stack::Lowers;
    use crate::upper::{Mode, UpperOptions};

    const SIZE: u64 = 1 << 20;

    fn file() -> Box<File> {
        Box::new(tempfile::tempfile().unwrap())
    }

    fn lowers() -> Arc<Lowers> {
        let mut output = tempfile::tempfile().unwrap();
        let options = CommitOptions {
            virtual_size: Some(SIZE),
            ..Default::default()
        };
        let mut writer = LayerWriter::new(&mut output, options).unwrap();
        writer.write(0, &[0xBA; SIZE as usize / 2]).unwrap();
        writer.finish().unwrap();
        Lowers::merge(vec![Arc::new(Layer::open(Arc::new(output)).unwrap())]).unwrap()
    }

    fn check(mode: Mode, step: u64) {
        let index: Box<dyn WriteAt> = file();
        let options = UpperOptions {
            mode,
            virtual_size: SIZE,
            uuid: None,
            parent_uuid: None,
            user_tag: Vec::new(),
        };
        let upper = Upper::create(file(), Some(index), options).unwrap();
        let stack = Stack::open(lowers(), Some(upper)).unwrap();
        // From the end to the beginning, so that no two runs are neighbours in the file.
        for number in (0..SIZE / SECTOR / step).rev() {
            let offset = number * step * SECTOR;
            if number % 7 == 3 {
                stack.discard(offset, SECTOR).unwrap();
            } else {
                stack
                    .write_at(&[number as u8; SECTOR as usize], offset)
                    .unwrap();
            }
        }
        let mut before = vec![0; SIZE as usize];
        stack.read_at(&mut before, 0).unwrap();
        let state = stack.state();
        let upper = state.upper().unwrap();
        for limit in [300, 100, 40] {
            stack.defragment(&state, upper, limit).unwrap();
            assert!(
                upper.records() <= limit,
                "{} records with limit {limit}",
                upper.records()
            );
            let mut after = vec![0; SIZE as usize];
            stack.read_at(&mut after, 0).unwrap();
            assert!(before == after, "limit {limit}");
        }
        let records = upper.records();
        stack.defragment(&state, upper, records).unwrap();
        assert_eq!(upper.records(), records, "nothing to do");
        let sealed = stack.seal().unwrap().layer;
        assert_eq!(sealed.records(), records);
    }

    #[test]
    fn neighbours_are_joined() {
        check(Mode::Hybrid, 1);
        check(Mode::Append, 1);
    }

    #[test]
    fn gaps_are_filled_from_below() {
        check(Mode::Hybrid, 3);
        check(Mode::Append, 20);
    }
}
