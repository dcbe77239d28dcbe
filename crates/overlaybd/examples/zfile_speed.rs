//! How fast ZFiles are written and read here: one JSON object per line, MB (10^6 bytes) of plain data per second.
//!
//! `zfile_speed [FILE] [MIB]` takes the content from the start of a file, otherwise makes some up.
//! Everything stays in memory: disks are not measured.

use std::error::Error;
use std::fs::File;
use std::io::{self, Cursor, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use overlaybd::io::ReadAt;
use overlaybd::zfile::{Algorithm, Options, Writer, ZFile};

struct Memory(Vec<u8>);

impl ReadAt for Memory {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = offset as usize;
        let part = self
            .0
            .get(start..start + buffer.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(part);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next();
    let mib: usize = arguments.next().map_or(Ok(64), |text| text.parse())?;
    let plain = match &path {
        Some(path) => {
            let mut bytes = Vec::new();
            File::open(path)?
                .take((mib << 20) as u64)
                .read_to_end(&mut bytes)?;
            bytes
        }
        None => made_up(mib << 20),
    };
    let cores = std::thread::available_parallelism()?.get().min(16);
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        for block_size in [4096, 32768] {
            for threads in if cores > 1 { vec![1, cores] } else { vec![1] } {
                measure(
                    &plain,
                    Options {
                        algorithm,
                        block_size,
                        verify: true,
                        threads,
                    },
                )?;
            }
        }
    }
    Ok(())
}

fn measure(plain: &[u8], options: Options) -> Result<(), Box<dyn Error>> {
    let megabytes = plain.len() as f64 / 1e6;
    let start = Instant::now();
    let mut writer = Writer::new(Cursor::new(Vec::with_capacity(plain.len())), options)?;
    writer.write_all(plain)?;
    let (sink, summary) = writer.finish_with_header()?;
    let compress = megabytes / start.elapsed().as_secs_f64();

    let zfile = ZFile::open(Arc::new(Memory(sink.into_inner())))?;
    let mut read = Vec::new();
    for request in [4096, 128 << 10] {
        let mut buffer = vec![0; request];
        let start = Instant::now();
        for part in (0..plain.len()).step_by(request) {
            let count = request.min(plain.len() - part);
            zfile.read_exact_at(&mut buffer[..count], part as u64)?;
        }
        read.push(megabytes / start.elapsed().as_secs_f64());
    }
    println!(
        "{{\"algorithm\": \"{}\", \"block_size\": {}, \"threads\": {}, \"plain_bytes\": {}, \"ratio\": {:.3}, \
         \"compress_mb_s\": {compress:.1}, \"read_4k_mb_s\": {:.1}, \"read_128k_mb_s\": {:.1}}}",
        match options.algorithm {
            Algorithm::Lz4 => "lz4",
            Algorithm::Zstd => "zstd",
        },
        options.block_size,
        options.threads,
        plain.len(),
        plain.len() as f64 / summary.stored_size as f64,
        read[0],
        read[1],
    );
    Ok(())
}

/// Words of a small vocabulary, some noise, some zeros.
fn made_up(size: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut bytes = Vec::with_capacity(size + 512);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match state % 8 {
            0 => bytes.extend_from_slice(&[0; 256]),
            1..=4 => bytes.extend_from_slice(&state.to_le_bytes()),
            _ => {
                bytes.extend_from_slice(format!("/usr/lib/{:03}.so;", state >> 8 & 511).as_bytes())
            }
        }
    }
    bytes.truncate(size);
    bytes
}
