//! Places at which a test kills the daemon, to see what the next one makes of it. Nothing in release builds.

/// The environment variable that names the place: `restack-sealed`, or `restack-sealed:3` for the third time.
#[cfg(debug_assertions)]
pub const VARIABLE: &str = "AENV_BLOCKD_KILL_AT";

/// Die here without a trace if a test said so.
#[cfg(debug_assertions)]
pub fn fail_point(name: &str) {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::OnceLock;

    static WANTED: OnceLock<Option<(String, u32)>> = OnceLock::new();
    static PASSED: AtomicU32 = AtomicU32::new(0);
    let wanted = WANTED.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let (name, count) = text.split_once(':').unwrap_or((&text, "1"));
        Some((name.to_owned(), count.parse().unwrap_or(1)))
    });
    if let Some((wanted, count)) = wanted {
        if wanted == name && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == *count {
            let _ = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::KILL,
            );
            loop {
                std::thread::park();
            }
        }
    }
}

/// Nothing.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn fail_point(_name: &str) {}
