//! Writable layers whose files were damaged: opening is an error or gives an upper that reads and writes, in bounded memory.

mod hostile_support;
mod lsmt_support;

use overlaybd::upper::Mode;
use overlaybd::Error;
use proptest::prelude::*;

use hostile_support::mutation::{apply, cases, mutations};
use hostile_support::{allocations, MEMORY_CAP};
use lsmt_support::{alone, reopen, upper, Disk, Random, SECTOR};

/// Data and index file of an upper with some writes and discards.
fn files(mode: Mode, seed: u64) -> Vec<Vec<u8>> {
    let disk = Disk::default();
    let stack = alone(upper(&disk, mode, 64 << 10));
    let mut random = Random(seed | 1);
    for step in 0..12u8 {
        let lba = random.below(120);
        let sectors = 1 + random.below(128 - lba).min(15);
        let offset = lba * SECTOR as u64;
        if random.chance(4) {
            stack
                .discard(offset, sectors * SECTOR as u64)
                .expect("discard");
        } else {
            let data = vec![step + 1; sectors as usize * SECTOR];
            stack.write_at(&data, offset).expect("write");
        }
    }
    stack.flush().expect("flush");
    disk.contents()
}

/// Open, read here and there, write a sector, read it again.
fn use_it(files: Vec<Vec<u8>>, mode: Mode) -> overlaybd::Result<()> {
    let disk = Disk::after(files, &[]);
    let stack = alone(reopen(&disk, mode, 0)?);
    let sectors = stack.virtual_size() / SECTOR as u64;
    let mut buffer = [0; 8 * SECTOR];
    for lba in [0, 8, 64, 120, sectors / 2, sectors.saturating_sub(8)] {
        if lba + 8 <= sectors {
            stack.read_at(&mut buffer, lba * SECTOR as u64)?;
        }
    }
    if sectors > 0 {
        let offset = (sectors / 2).min(70) * SECTOR as u64;
        let written = [0xA7; SECTOR];
        stack.write_at(&written, offset)?;
        let mut read = [0; SECTOR];
        stack.read_at(&mut read, offset)?;
        assert_eq!(read, written, "a sector reads as it was written");
        stack.flush()?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn damaged_uppers(
        mode in prop::sample::select(vec![Mode::Append, Mode::Hybrid, Mode::Sparse]),
        seed in 0u64..50,
        data in mutations(),
        index in mutations(),
        whole_data: bool,
    ) {
        let mut files = files(mode, seed);
        if !whole_data || mode == Mode::Sparse {
            apply(&data, &mut files[0], &[24..134, 28..56]);
        }
        if let Some(file) = files.get_mut(1) {
            apply(&index, file, &[24..134, 4096..4160, 4096..4352]);
        }
        let (result, peak) = allocations::peak(|| use_it(files, mode));
        prop_assert!(peak <= MEMORY_CAP, "{} bytes of memory", peak);
        if let Err(error) = result {
            prop_assert!(!error.is_out_of_space());
        }
    }
}

/// An index of which any number of bytes got to the disk opens; so does data that ends anywhere, behind its header.
#[test]
fn cut_at_any_length() {
    for mode in [Mode::Append, Mode::Hybrid] {
        let whole = files(mode, 5);
        use_it(whole.clone(), mode).expect("whole");
        for number in [0, 1] {
            for length in 0..whole[number].len() {
                let mut files = whole.clone();
                files[number].truncate(length);
                match use_it(files, mode) {
                    Ok(()) => assert!(length >= 4096, "file {number} of {length} bytes"),
                    Err(Error::Format(_) | Error::Io(_)) => {
                        assert!(length < 4096, "file {number} of {length} bytes");
                    }
                    Err(other) => panic!("file {number} of {length} bytes: {other}"),
                }
            }
        }
    }
}
