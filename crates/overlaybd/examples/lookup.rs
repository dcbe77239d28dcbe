//! Measures index lookups: for 1 000 to 1 000 000 records, the best time of five to merge the indexes of two layers, and
//! how many random sectors one thread finds per second in it. The time of lookups is the processor's, so that a busy
//! machine does not matter much. One JSON object per line. Nothing but the index is touched.

use std::hint::black_box;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use overlaybd::commit::{CommitOptions, LayerWriter};
use overlaybd::io::ReadAt;
use overlaybd::layer::Layer;
use overlaybd::stack::Lowers;

const SECTOR: u64 = 512;
const TIME: Duration = Duration::from_millis(500);

struct Bytes(Vec<u8>);

impl ReadAt for Bytes {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let source = self
            .0
            .get(start..start + buffer.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(source);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }
}

/// A layer with one sector of data in every eight, from `first` on.
fn layer(records: u64, first: u64) -> overlaybd::Result<Layer> {
    let mut file = Vec::new();
    let options = CommitOptions {
        virtual_size: Some((records + 1) * 8 * SECTOR),
        ..CommitOptions::default()
    };
    let mut writer = LayerWriter::new(&mut file, options)?;
    for number in 0..records {
        writer.write((number * 8 + first) * SECTOR, &[1; SECTOR as usize])?;
    }
    writer.finish()?;
    Layer::open(Arc::new(Bytes(file)))
}

/// Time that this thread has had a processor; without the kernel's accounting, time of the clock.
fn processor_time(since: Instant) -> Duration {
    let statistics = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = statistics
        .split(' ')
        .next()
        .and_then(|value| value.parse().ok());
    nanoseconds.map_or_else(|| since.elapsed(), Duration::from_nanos)
}

fn main() -> overlaybd::Result<()> {
    let start = Instant::now();
    for records in [1_000, 10_000, 100_000, 990_000_u64] {
        // Half of the records each, interleaved, which is the most work for a merge. A layer that is written closes
        // small gaps when it has very many records, hence two.
        let half = records / 2;
        let layers = vec![Arc::new(layer(half, 0)?), Arc::new(layer(half, 4)?)];
        let mut merged = Duration::MAX;
        for _ in 0..5 {
            let began = Instant::now();
            Lowers::merge(layers.clone())?;
            merged = merged.min(began.elapsed());
        }
        let lowers = Lowers::merge(layers)?;
        let index = lowers.index();
        let sectors = half * 8;
        let mut state = 1_u64;
        let mut lookups = 0_u64;
        let began = processor_time(start);
        let clock = Instant::now();
        while clock.elapsed() < TIME {
            for _ in 0..4096 {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                black_box(index.pieces((state >> 20) % sectors, 8).next());
            }
            lookups += 4096;
        }
        let rate = lookups as f64 / (processor_time(start) - began).as_secs_f64();
        println!(
            "{{\"records\": {}, \"lookups_per_s\": {rate:.0}, \"merge_ms\": {:.3}}}",
            index.len(),
            merged.as_secs_f64() * 1000.0
        );
    }
    Ok(())
}
