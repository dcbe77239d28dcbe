//! Load for an NBD server on a unix socket, ours or another: reads or writes, sequential or random, with a number of requests
//! in flight. Prints one JSON object. Used by the benchmarks to compare servers with the same client.
//!
//! Not a benchmark by itself: it knows nothing of the server.

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const USAGE: &str = "\
usage: nbd_load --socket PATH [--export NAME] [--operation read|write] [--pattern sequential|random]
                [--size BYTES] [--depth N] [--seconds S | --requests N] [--span BYTES] [--stride BYTES] [--seed N]
                [--flush]";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Load {
    socket: PathBuf,
    export: String,
    write: bool,
    random: bool,
    /// Bytes of a request.
    size: u32,
    /// Requests in flight.
    depth: usize,
    time: Duration,
    /// Ends after so many, however long they take; 0: when the time is over.
    requests: u64,
    /// Bytes from the begin of one place for a request to the next; 0: the size of a request.
    stride: u64,
    /// Bytes from the begin of the device that are used; 0: all.
    span: u64,
    seed: u64,
    /// Flush at the end, and count that time.
    flush: bool,
}

fn main() -> Result<()> {
    let load = parse()?;
    let (mut stream, device_size) = connect(&load)?;
    let span = if load.span == 0 {
        device_size
    } else {
        load.span.min(device_size)
    };
    let stride = if load.stride == 0 {
        u64::from(load.size)
    } else {
        load.stride
    };
    let blocks = span / stride;
    if blocks == 0 {
        return Err("the device is smaller than one request".into());
    }
    let mut offsets = Offsets {
        random: load.random,
        blocks,
        stride,
        state: load.seed | 1,
        next: 0,
    };
    // Compressible, and different in each request's first bytes.
    let payload: Vec<u8> = (0..load.size).map(|at| (at / 64) as u8).collect();
    let mut data = vec![0; load.size as usize];
    let mut sent_at = std::collections::HashMap::new();
    let mut latencies: Vec<u32> = Vec::with_capacity(1 << 20);
    let mut cookie = 0u64;
    let mut in_flight = 0;
    let started = Instant::now();
    let mut batch = Vec::new();
    let mut reader = Reader::new(stream.try_clone()?);
    loop {
        let over = load.requests == 0 && started.elapsed() >= load.time;
        let is_over = |sent: u64| over || (load.requests > 0 && sent == load.requests);
        if is_over(cookie) && in_flight == 0 {
            break;
        }
        batch.clear();
        while !is_over(cookie) && in_flight < load.depth {
            cookie += 1;
            request(
                &mut batch,
                u16::from(load.write),
                cookie,
                offsets.next(),
                load.size,
            );
            if load.write {
                batch.extend_from_slice(&cookie.to_le_bytes());
                batch.extend_from_slice(&payload[8..]);
            }
            sent_at.insert(cookie, Instant::now());
            in_flight += 1;
        }
        if !batch.is_empty() {
            stream.write_all(&batch)?;
        }
        // One reply, then all that arrived with it.
        loop {
            let answered = reader.reply(if load.write { &mut [] } else { &mut data })?;
            let since = sent_at.remove(&answered).ok_or("a reply to nothing")?;
            latencies.push(u32::try_from(since.elapsed().as_nanos()).unwrap_or(u32::MAX));
            in_flight -= 1;
            if in_flight == 0 || !reader.has_reply(if load.write { 0 } else { data.len() }) {
                break;
            }
        }
    }
    if load.flush {
        batch.clear();
        request(&mut batch, 3, u64::MAX, 0, 0);
        stream.write_all(&batch)?;
        reader.reply(&mut [])?;
    }
    let elapsed = started.elapsed().as_secs_f64();
    batch.clear();
    request(&mut batch, 2, 0, 0, 0);
    stream.write_all(&batch)?;
    latencies.sort_unstable();
    let count = latencies.len();
    let percentile = |share: usize| f64::from(latencies[(count - 1) * share / 100]) / 1000.0;
    let bytes = count as f64 * f64::from(load.size);
    println!(
        "{{\"operation\": \"{}\", \"pattern\": \"{}\", \"size\": {}, \"depth\": {}, \"seconds\": {elapsed:.3}, \
         \"requests\": {count}, \"iops\": {:.0}, \"mib_per_s\": {:.1}, \"p50_us\": {:.1}, \"p99_us\": {:.1}, \
         \"max_us\": {:.1}}}",
        if load.write { "write" } else { "read" },
        if load.random { "random" } else { "sequential" },
        load.size,
        load.depth,
        count as f64 / elapsed,
        bytes / elapsed / f64::from(1 << 20),
        percentile(50),
        percentile(99),
        percentile(100),
    );
    Ok(())
}

fn parse() -> Result<Load> {
    let mut load = Load {
        socket: PathBuf::new(),
        export: String::new(),
        write: false,
        random: false,
        size: 4096,
        depth: 16,
        time: Duration::from_secs(5),
        requests: 0,
        stride: 0,
        span: 0,
        seed: 1,
        flush: false,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(option) = arguments.next() {
        if option == "--flush" {
            load.flush = true;
            continue;
        }
        let value = arguments.next().ok_or(USAGE)?;
        match option.as_str() {
            "--socket" => load.socket = value.into(),
            "--export" => load.export = value,
            "--operation" => load.write = value == "write",
            "--pattern" => load.random = value == "random",
            "--size" => load.size = value.parse()?,
            "--depth" => load.depth = value.parse()?,
            "--seconds" => load.time = Duration::from_secs_f64(value.parse()?),
            "--requests" => load.requests = value.parse()?,
            "--stride" => load.stride = value.parse()?,
            "--span" => load.span = value.parse()?,
            "--seed" => load.seed = value.parse()?,
            _ => return Err(USAGE.into()),
        }
    }
    let strides = load.stride == 0 || load.stride >= u64::from(load.size);
    if load.socket.as_os_str().is_empty() || load.depth == 0 || load.size < 512 || !strides {
        return Err(USAGE.into());
    }
    Ok(load)
}

/// Where requests go.
struct Offsets {
    random: bool,
    blocks: u64,
    stride: u64,
    state: u64,
    next: u64,
}

impl Offsets {
    fn next(&mut self) -> u64 {
        if self.random {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            return (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) % self.blocks
                * self.stride;
        }
        let block = self.next;
        self.next = (block + 1) % self.blocks;
        block * self.stride
    }
}

/// Handshake with simple replies; the size of the export.
fn connect(load: &Load) -> Result<(UnixStream, u64)> {
    let mut stream = UnixStream::connect(&load.socket)?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
        return Err("this is no NBD server of the newer style".into());
    }
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend_from_slice(b"IHAVEOPT");
    bytes.extend_from_slice(&7u32.to_be_bytes());
    // Block sizes are asked for, so that servers with limits let us go on.
    let length = u32::try_from(load.export.len())?;
    bytes.extend_from_slice(&(length + 8).to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(load.export.as_bytes());
    bytes.extend_from_slice(&[0, 1, 0, 3]);
    stream.write_all(&bytes)?;
    let mut size = None;
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header)?;
        let kind = u32::from_be_bytes(header[12..16].try_into()?);
        let mut data = vec![0; u32::from_be_bytes(header[16..20].try_into()?) as usize];
        stream.read_exact(&mut data)?;
        match kind {
            1 => {
                return Ok((
                    stream,
                    size.ok_or("the server does not say how large it is")?,
                ))
            }
            3 if data.len() >= 12 && data[..2] == [0, 0] => {
                size = Some(u64::from_be_bytes(data[2..10].try_into()?))
            }
            3 => {}
            other => return Err(format!("the server refuses: {other:x}").into()),
        }
    }
}

fn request(bytes: &mut Vec<u8>, command: u16, cookie: u64, offset: u64, length: u32) {
    bytes.extend_from_slice(&0x2560_9513u32.to_be_bytes());
    bytes.extend_from_slice(&0u16.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
}

/// Replies, read with as few system calls as the server's sending allows.
struct Reader {
    stream: UnixStream,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Reader {
    fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: vec![0; 256 * 1024],
            start: 0,
            end: 0,
        }
    }

    fn has_reply(&self, data: usize) -> bool {
        self.end - self.start >= 16 + data
    }

    /// The cookie of the next reply; its data goes to `data`.
    fn reply(&mut self, data: &mut [u8]) -> Result<u64> {
        while self.end - self.start < 16 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let count = self.stream.read(&mut self.buffer[self.end..])?;
            if count == 0 {
                return Err("the server ended the connection".into());
            }
            self.end += count;
        }
        let header: [u8; 16] = self.buffer[self.start..self.start + 16].try_into()?;
        self.start += 16;
        if header[..4] != 0x6744_6698u32.to_be_bytes() || header[4..8] != [0; 4] {
            return Err(format!("an error or no reply: {header:x?}").into());
        }
        let here = data.len().min(self.end - self.start);
        data[..here].copy_from_slice(&self.buffer[self.start..self.start + here]);
        self.start += here;
        self.stream.read_exact(&mut data[here..])?;
        Ok(u64::from_be_bytes(header[8..].try_into()?))
    }
}
