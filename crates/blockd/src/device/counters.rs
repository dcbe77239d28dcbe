//! What was done with a device, counted without locks.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::Serialize;

/// Counts of one device since it was opened.
#[derive(Default)]
pub struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    discards: AtomicU64,
    discarded_bytes: AtomicU64,
    flushes: AtomicU64,
    errors: AtomicU64,
    in_flight: AtomicU64,
}

/// The counts at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[allow(missing_docs)]
pub struct Totals {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    pub discards: u64,
    pub discarded_bytes: u64,
    pub flushes: u64,
    pub errors: u64,
    pub in_flight: u64,
}

impl Counters {
    /// A read was done.
    pub fn read(&self, bytes: usize) {
        self.reads.fetch_add(1, Relaxed);
        self.read_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// A write was done.
    pub fn write(&self, bytes: usize) {
        self.writes.fetch_add(1, Relaxed);
        self.written_bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// A discard, or zeros that store nothing, was done.
    pub fn discard(&self, bytes: u64) {
        self.discards.fetch_add(1, Relaxed);
        self.discarded_bytes.fetch_add(bytes, Relaxed);
    }

    /// A flush was done.
    pub fn flush(&self) {
        self.flushes.fetch_add(1, Relaxed);
    }

    /// A request failed.
    pub fn error(&self) {
        self.errors.fetch_add(1, Relaxed);
    }

    /// A request arrived.
    pub fn started(&self) {
        self.in_flight.fetch_add(1, Relaxed);
    }

    /// A request was answered.
    pub fn finished(&self) {
        self.in_flight.fetch_sub(1, Relaxed);
    }

    /// All counts. They are read one after the other.
    #[must_use]
    pub fn totals(&self) -> Totals {
        Totals {
            reads: self.reads.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            writes: self.writes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            discards: self.discards.load(Relaxed),
            discarded_bytes: self.discarded_bytes.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            errors: self.errors.load(Relaxed),
            in_flight: self.in_flight.load(Relaxed),
        }
    }
}

/// Lets one through per second.
#[derive(Default)]
pub struct Limiter(AtomicU64);

impl Limiter {
    const PERIOD: Duration = Duration::from_secs(1);

    /// Whether it is time again.
    pub fn permits(&self) -> bool {
        static START: OnceLock<Instant> = OnceLock::new();
        let now = START.get_or_init(Instant::now).elapsed() + Self::PERIOD;
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let last = self.0.load(Relaxed);
        let period = u64::try_from(Self::PERIOD.as_millis()).unwrap_or(u64::MAX);
        now - last.min(now) >= period
            && self.0.compare_exchange(last, now, Relaxed, Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limiter_lets_one_through() {
        let limiter = Limiter::default();
        assert!(limiter.permits());
        assert!(!limiter.permits());
        limiter.0.fetch_sub(1000, Relaxed);
        assert!(limiter.permits());
    }
}
