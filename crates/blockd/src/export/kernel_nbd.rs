//! The kernel NBD export: `/dev/nbd<number>`, whose sockets are pairs that this process serves.
//!
//! The kernel keeps the device when the daemon is killed, and requests wait for new sockets. Those that were on their way
//! are sent again when they have had no answer for [`REQUEST_TIMEOUT_S`]; `fence` says why that is safe.
//! Must not know of layers or the protocol.

mod fence;
mod netlink;

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{capabilities, CapabilitySet};

use super::{Export, ExportRecord, Start, Stop, Target};
use crate::backend::SECTOR;
use crate::error::{Error, Result};
use crate::nbd::wire::export_flag as flag;
use crate::nbd::{serve_transmission, Agreement};
use crate::workers::THREAD_STACK;
use fence::{Changes, Fenced};
use netlink::{Device, Family};

/// How long clients pause at most, beyond the time that the daemon is away.
const REQUEST_TIMEOUT_S: u64 = 5;
/// How long the kernel keeps requests for a daemon that is away.
const DAEMON_AWAY_S: u64 = 24 * 60 * 60;
/// A connection that ends is replaced after this pause, which doubles while new ones do not last.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const LARGEST_NUMBER: u32 = 4095;

/// Whether this host can make NBD devices; the error says what is missing.
///
/// # Errors
/// `Unsupported`.
pub fn check_host() -> Result<()> {
    open_family().map(|_| ())
}

fn open_family() -> Result<Family> {
    let unsupported = |reason: String| Error::Unsupported(format!("kernel NBD: {reason}"));
    let allowed =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    if !allowed {
        return Err(unsupported(
            "making devices needs root (CAP_SYS_ADMIN)".into(),
        ));
    }
    Family::open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => unsupported("the kernel module nbd is not loaded".into()),
        _ => unsupported(format!("no netlink: {error}")),
    })
}

/// A number that is not connected and not in `taken` (numbers in the daemon's own records).
///
/// # Errors
/// `Unsupported` on a host without the `nbd` module.
pub fn free_number(taken: &[u32]) -> Result<u32> {
    check_host()?;
    (0..=LARGEST_NUMBER)
        .find(|number| !taken.contains(number) && owner_of(*number).is_none())
        .ok_or_else(|| {
            Error::Unsupported("kernel NBD: this host has as many devices as it can have".into())
        })
}

fn sysfs(number: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/nbd{number}"))
}

/// What the one who connected the device calls it, empty when nothing; `None` when it is not connected.
fn owner_of(number: u32) -> Option<String> {
    sysfs(number).join("pid").exists().then(|| {
        std::fs::read_to_string(sysfs(number).join("backend"))
            .unwrap_or_default()
            .trim_end()
            .to_owned()
    })
}

/// Connect or reconnect `/dev/nbd<number>` with `connections` socket pairs, each served by
/// [`crate::nbd::serve_transmission`] in a thread of its own.
///
/// # Errors
/// `Unsupported`, `Conflict` (number taken), `Io`.
pub fn start(
    target: Target,
    number: u32,
    connections: u16,
    start: Start,
) -> Result<Box<dyn Export>> {
    let mut family = open_family()?;
    let backend_name = name_of(&target.device);
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for _ in 0..connections.max(1) {
        let (our_end, kernel_end) = UnixStream::pair()
            .map_err(|error| Error::io(format!("/dev/nbd{number}: a socket pair"), &error))?;
        ours.push(our_end);
        theirs.push(kernel_end);
    }
    let theirs: Vec<_> = theirs.iter().map(AsFd::as_fd).collect();
    let size = target.backend.size();
    let result = match owner_of(number) {
        Some(owner) if start == Start::Recover && owner == backend_name => {
            family.reconfigure(number, &backend_name, Some(size), &theirs)
        }
        Some(_) => Err(rustix::io::Errno::BUSY.into()),
        None => {
            let device = Device {
                size,
                block_size: SECTOR,
                server_flags: server_flags(&target),
                request_timeout_s: REQUEST_TIMEOUT_S,
                dead_connection_timeout_s: DAEMON_AWAY_S,
                backend: &backend_name,
                // The module's own nodes stay, as it wants them.
                destroy_on_disconnect: !sysfs(number).exists(),
            };
            family.connect(number, &device, &theirs)
        }
    };
    result.map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => Error::Conflict(format!("/dev/nbd{number} belongs to somebody else")),
        _ => Error::io(format!("cannot connect /dev/nbd{number}"), &error),
    })?;
    let mut export = KernelNbd {
        record: ExportRecord::KernelNbd {
            connections,
            number,
        },
        shared: Arc::new(Shared {
            number,
            backend_name,
            target,
            changes: Arc::default(),
            serving: AtomicUsize::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        }),
        threads: Vec::new(),
    };
    for (index, socket) in ours.into_iter().enumerate() {
        if let Err(error) = export.start_connection(index, socket) {
            let _ = export.end(Stop::Remove);
            return Err(Error::io(format!("/dev/nbd{number}: a thread"), &error));
        }
    }
    Ok(Box::new(export))
}

/// Remove what a daemon before us left of `/dev/nbd<number>`. That there is nothing, or somebody else's, is no error.
///
/// # Errors
/// `Io`.
pub fn remove_left(device: &str, number: u32) -> Result<()> {
    if owner_of(number) != Some(name_of(device)) {
        return Ok(());
    }
    // Requests that wait in it fail.
    open_family()?
        .disconnect(number)
        .map_err(|error| Error::io(format!("cannot disconnect /dev/nbd{number}"), &error))
}

/// Tells our devices from others; the kernel keeps it.
fn name_of(device: &str) -> String {
    format!("aenv:{device}")
}

fn server_flags(target: &Target) -> u16 {
    let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::CAN_MULTI_CONN;
    flags |= if target.backend.is_read_only() {
        flag::READ_ONLY
    } else {
        flag::SEND_FUA | flag::SEND_TRIM | flag::SEND_WRITE_ZEROES
    };
    flags
}

struct KernelNbd {
    record: ExportRecord,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    number: u32,
    backend_name: String,
    target: Target,
    changes: Arc<Changes>,
    serving: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stopping: bool,
    /// Our ends of the connections that are served, with the numbers of their threads.
    sockets: Vec<(usize, Arc<UnixStream>)>,
}

impl KernelNbd {
    fn start_connection(&mut self, index: usize, socket: UnixStream) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(format!("nbd{}.{index}", self.shared.number))
            .stack_size(THREAD_STACK)
            .spawn(move || shared.keep_connected(index, socket))?;
        self.threads.push(thread);
        Ok(())
    }

    fn end(&mut self, how: Stop) -> Result<()> {
        let shared = &self.shared;
        shared.lock().stopping = true;
        shared.changed.notify_all();
        let result = match how {
            Stop::Detach => Ok(()),
            Stop::Remove => open_family().and_then(|mut family| {
                family.disconnect(shared.number).map_err(|error| {
                    Error::io(
                        format!("cannot disconnect /dev/nbd{}", shared.number),
                        &error,
                    )
                })
            }),
        };
        for (_, socket) in &shared.lock().sockets {
            // The kernel has shut it down already, unless we detach.
            let _ = socket.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            // Panics were caught inside.
            let _ = thread.join();
        }
        result
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one of the device's connections, and puts a new one in its place when it ends before the export does.
    fn keep_connected(&self, index: usize, mut socket: UnixStream) {
        let mut pause = FIRST_PAUSE;
        loop {
            let began = Instant::now();
            self.serve(index, socket);
            if began.elapsed() > LONGEST_PAUSE {
                pause = FIRST_PAUSE;
            }
            socket = loop {
                if self.wait_for_stop(pause) {
                    return;
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
                match self.replace() {
                    Ok(socket) => break socket,
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                        tracing::warn!(device = %self.target.device, number = self.number, "somebody disconnected the device");
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(device = %self.target.device, number = self.number, %error, "cannot connect again");
                    }
                }
            };
        }
    }

    fn serve(&self, index: usize, socket: UnixStream) {
        let socket = Arc::new(socket);
        {
            let mut state = self.lock();
            if state.stopping {
                return;
            }
            state.sockets.push((index, Arc::clone(&socket)));
        }
        self.serving.fetch_add(1, Ordering::Relaxed);
        let target = Target {
            backend: Arc::new(Fenced {
                backend: Arc::clone(&self.target.backend),
                changes: Arc::clone(&self.changes),
                socket: Arc::clone(&socket),
            }),
            ..self.target.clone()
        };
        let serve = || serve_transmission(Arc::clone(&socket), &target, Agreement::default());
        let problem = match catch_unwind(AssertUnwindSafe(serve)) {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("it panicked".into()),
        };
        if let Some(problem) = problem {
            tracing::warn!(device = %self.target.device, number = self.number, %problem, "a connection ended");
        }
        // Whatever made it end: the kernel must see it, even while somebody still holds the socket.
        let _ = socket.shutdown(Shutdown::Both);
        self.serving.fetch_sub(1, Ordering::Relaxed);
        self.lock().sockets.retain(|(other, _)| *other != index);
    }

    /// Give the kernel a new socket in the place of one that is dead.
    fn replace(&self) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        Family::open()?.reconfigure(self.number, &self.backend_name, None, &[theirs.as_fd()])?;
        Ok(ours)
    }

    /// Whether the export ends; waits for that as long as `pause`.
    fn wait_for_stop(&self, pause: Duration) -> bool {
        let state = self.lock();
        self.changed
            .wait_timeout_while(state, pause, |state| !state.stopping)
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .stopping
    }
}

impl Export for KernelNbd {
    fn record(&self) -> &ExportRecord {
        &self.record
    }

    fn connections(&self) -> usize {
        self.shared.serving.load(Ordering::Relaxed)
    }

    fn resized(&self) -> Result<()> {
        let shared = &self.shared;
        let size = shared.target.backend.size();
        open_family()?
            .reconfigure(shared.number, &shared.backend_name, Some(size), &[])
            .map_err(|error| Error::io(format!("cannot resize /dev/nbd{}", shared.number), &error))
    }

    fn stop(mut self: Box<Self>, how: Stop) -> Result<()> {
        self.end(how)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_the_module_is_told_apart() {
        if sysfs(0).exists() {
            return;
        }
        let error = check_host().unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
        assert!(free_number(&[]).is_err());
    }
}
