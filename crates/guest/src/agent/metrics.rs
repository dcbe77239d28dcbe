//! Numbers about the guest, from `/proc` and the root file system. Only reads.

use std::{
    fs, io,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use axum::{extract::State, response::IntoResponse, response::Response};
use http::{header::CONTENT_TYPE, StatusCode};
use serde::Serialize;

use super::{error::HttpError, state::AgentState};

const MIB: u64 = 1 << 20;
/// Two samples closer than this say nothing: the kernel counts in ticks of 10 ms.
const MIN_INTERVAL: Duration = Duration::from_millis(200);

/// The body of `GET /metrics`. `mem_*` and `disk_*` in bytes unless their name says MiB.
#[derive(Serialize)]
struct Metrics {
    /// Unix time in seconds.
    ts: u64,
    cpu_count: usize,
    /// Share of all processors' time since the last request, 0 to 100.
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Remembers the last look at the processors' counters.
#[derive(Default)]
pub struct CpuMeter(Mutex<Meter>);

#[derive(Default)]
struct Meter {
    last: Option<(Instant, CpuTimes)>,
    percent: f64,
}

/// Processor time in ticks since boot.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
struct CpuTimes {
    busy: u64,
    total: u64,
}

impl CpuMeter {
    /// Percent of all processors' time that was not idle since the last call (since boot for the first).
    fn measure(&self) -> io::Result<f64> {
        let now = CpuTimes::parse(&fs::read_to_string("/proc/stat")?)
            .ok_or_else(|| io::Error::other("/proc/stat has no cpu line"))?;
        let mut meter = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match meter.last {
            Some((when, _)) if when.elapsed() < MIN_INTERVAL => return Ok(meter.percent),
            Some((_, times)) => times,
            None => CpuTimes::default(),
        };
        meter.percent = now.percent_since(before);
        meter.last = Some((Instant::now(), now));
        Ok(meter.percent)
    }
}

impl CpuTimes {
    /// Reads the first line of `/proc/stat`: user nice system idle iowait irq softirq steal guest guest_nice.
    fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find(|line| line.starts_with("cpu "))?;
        // The guest times are already part of user and nice.
        let times: Vec<u64> = line
            .split_whitespace()
            .skip(1)
            .take(8)
            .map(|word| word.parse().unwrap_or(0))
            .collect();
        let total = times.iter().sum();
        let idle: u64 = times.iter().skip(3).take(2).sum();
        Some(Self {
            busy: total - idle,
            total,
        })
    }

    fn percent_since(self, before: Self) -> f64 {
        let total = self.total.saturating_sub(before.total);
        if total == 0 {
            return 0.0;
        }
        let busy = self.busy.saturating_sub(before.busy);
        // Two digits are all that the tick resolution supports.
        (busy as f64 / total as f64 * 10_000.0).round() / 100.0
    }
}

/// Memory in bytes.
pub struct Memory {
    pub total: u64,
    pub available: u64,
    pub cache: u64,
}

/// Reads `/proc/meminfo`.
pub fn memory() -> io::Result<Memory> {
    parse_memory(&fs::read_to_string("/proc/meminfo")?)
        .ok_or_else(|| io::Error::other("/proc/meminfo lacks a line"))
}

fn parse_memory(text: &str) -> Option<Memory> {
    let kib = |name: &str| -> Option<u64> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some(Memory {
        total: kib("MemTotal")? << 10,
        available: kib("MemAvailable")? << 10,
        cache: (kib("Cached")? + kib("SReclaimable").unwrap_or(0)) << 10,
    })
}

/// `GET /metrics`.
pub async fn handler(State(state): State<Arc<AgentState>>) -> Response {
    match collect(&state.cpu) {
        Ok(metrics) => match serde_json::to_string(&metrics) {
            Ok(body) => ([(CONTENT_TYPE, "application/json")], body).into_response(),
            Err(error) => failed(&error),
        },
        Err(error) => failed(&error),
    }
}

fn failed(error: &dyn std::fmt::Display) -> Response {
    HttpError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("cannot read the metrics: {error}"),
    )
    .into_response()
}

fn collect(cpu: &CpuMeter) -> io::Result<Metrics> {
    let memory = memory()?;
    let used = memory.total.saturating_sub(memory.available);
    let disk = nix::sys::statvfs::statvfs("/")?;
    let block = disk.fragment_size();
    Ok(Metrics {
        ts: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs(),
        cpu_count: cpu_count(),
        cpu_used_pct: cpu.measure()?,
        mem_total: memory.total,
        mem_used: used,
        mem_cache: memory.cache,
        mem_total_mib: memory.total / MIB,
        mem_used_mib: used / MIB,
        disk_used: (disk.blocks() - disk.blocks_free()) * block,
        disk_total: disk.blocks() * block,
    })
}

/// Processors that the kernel runs on, whatever our own affinity is.
fn cpu_count() -> usize {
    // SAFETY: sysconf only reads.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(count).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_counts_neither_idle_nor_iowait() {
        let before = CpuTimes::parse("cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 1 1\n").unwrap();
        assert_eq!(
            before,
            CpuTimes {
                busy: 200,
                total: 1000
            }
        );
        let after = CpuTimes::parse("cpu  130 0 120 720 130 0 0 0 50 0\n").unwrap();
        assert_eq!(after.percent_since(before), 50.0);
        assert_eq!(after.percent_since(after), 0.0);
    }

    #[test]
    fn meminfo_is_in_kib() {
        let text = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable:  600 kB\nSwapCached: 9 kB\nCached: 200 kB\n\
                    SReclaimable: 50 kB\n";
        let memory = parse_memory(text).unwrap();
        assert_eq!(
            (memory.total, memory.available, memory.cache),
            (1_024_000, 614_400, 256_000)
        );
        assert!(parse_memory("MemTotal: x kB").is_none());
    }
}
