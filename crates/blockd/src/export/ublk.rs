//! The ublk export: a block device of the kernel whose requests come to this process through `io_uring`.
//!
//! The kernel keeps the device, with the requests that wait, when the daemon is killed (user recovery), and hands requests
//! that the daemon had begun to its successor: they are positioned, so doing one again is harmless.
//! This file makes, takes back and removes devices; `queue` serves their requests. Must not know of layers or the protocol.

mod queue;

use std::fs::OpenOptions;
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;

use io_uring::squeue::Entry128;
use io_uring::IoUring;
use libublk::ctrl::{ublk_init_ctrl_task_ring, UblkCtrl, UblkCtrlBuilder};
use libublk::io::UblkDev;
use libublk::{sys, UblkError, UblkFlags};

use super::{Export, ExportRecord, Start, Stop, Target};
use crate::backend::{BlockBackend, SECTOR};
use crate::error::{Error, Result};
use crate::workers::THREAD_STACK;
use queue::Mailbox;

const CONTROL: &str = "/dev/ublk-control";
/// Requests of one thread to the driver; there is one at a time.
const CONTROL_RING: u32 = 4;
const SYSFS: &str = "/sys/class/ublk-char";
/// Largest request, bytes. Each of `queues` × `depth` requests has a buffer of this size; memory is taken when it is used.
const REQUEST_BYTES: u32 = 128 * 1024;
/// Largest discard or write of zeros, sectors.
const ZEROED_SECTORS: u32 = 1 << 21;
/// Log2 of the sizes of logical and physical blocks.
const LOGICAL_SHIFT: u8 = 9;
const PHYSICAL_SHIFT: u8 = 12;
const NEEDED: u64 = (sys::UBLK_F_USER_RECOVERY | sys::UBLK_F_USER_RECOVERY_REISSUE) as u64;

/// Whether this host can make ublk devices; the error says what is missing.
///
/// # Errors
/// `Unsupported`.
pub fn check_host() -> Result<()> {
    let unsupported = |reason: &str| Err(Error::Unsupported(format!("ublk: {reason}")));
    match OpenOptions::new().read(true).write(true).open(CONTROL) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return unsupported("no permission to open /dev/ublk-control: it needs root");
        }
        Err(error) => {
            return unsupported(&format!(
                "/dev/ublk-control: {error} (is the kernel module ublk_drv loaded?)"
            ));
        }
    }
    match UblkCtrl::get_features() {
        Some(features) if features & NEEDED == NEEDED => Ok(()),
        Some(_) => unsupported("this kernel's driver cannot hand a device to a restarted daemon"),
        None => unsupported(
            "the driver does not tell its features: Linux 6.5 or newer is needed, with io_uring enabled",
        ),
    }
}

/// A number that no ublk device has and that is not in `taken` (numbers in the daemon's own records).
///
/// # Errors
/// `Unsupported` on a host without ublk.
pub fn free_number(taken: &[u32]) -> Result<u32> {
    check_host()?;
    (0..sys::UBLK_MAX_QUEUE_DEPTH)
        .find(|number| !taken.contains(number) && !device_exists(*number))
        .ok_or_else(|| {
            Error::Unsupported("ublk: this host has as many devices as it can have".into())
        })
}

fn device_exists(number: u32) -> bool {
    Path::new(SYSFS).join(format!("ublkc{number}")).exists()
}

/// Make or take back `/dev/ublkb<number>`.
///
/// # Errors
/// `Unsupported`, `Conflict` (number taken), `Io`.
pub fn start(
    target: Target,
    number: u32,
    queues: u16,
    depth: u16,
    start: Start,
) -> Result<Box<dyn Export>> {
    check_host()?;
    let identity = identity_of(&target.device);
    let recovered = match start {
        Start::Recover if device_exists(number) => take_back(number, identity)?,
        Start::Recover | Start::New => None,
    };
    let control = match recovered {
        Some(control) => control,
        None => add(number, queues, depth, identity)?,
    };
    launch(target, control, number).map(|export| Box::new(export) as Box<dyn Export>)
}

/// Tells our device from one that somebody else made under its number after a reboot. The kernel keeps it with the device.
fn identity_of(device: &str) -> u64 {
    // FNV-1a (http://www.isthe.com/chongo/tech/comp/fnv/): the same in every release of the daemon.
    device.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn builder<'a>(number: u32, identity: u64) -> Result<UblkCtrlBuilder<'a>> {
    let number = i32::try_from(number)
        .map_err(|_| Error::BadRequest(format!("ublk: there is no device number {number}")))?;
    Ok(UblkCtrlBuilder::default()
        .name("aenv")
        .id(number)
        .ctrl_flags(NEEDED)
        .ctrl_target_flags(identity))
}

fn add(number: u32, queues: u16, depth: u16, identity: u64) -> Result<UblkCtrl> {
    builder(number, identity)?
        .nr_queues(queues)
        .depth(depth)
        .io_buf_bytes(REQUEST_BYTES)
        .dev_flags(UblkFlags::UBLK_DEV_F_ADD_DEV)
        .build()
        .map_err(|error| match errno_of(&error) {
            Some(libc::EEXIST) => {
                Error::Conflict(format!("/dev/ublkb{number} belongs to somebody else"))
            }
            _ => failed(number, "add", &error),
        })
}

/// The device of a daemon before us, ready for new queues; `None` when it was never started.
fn take_back(number: u32, identity: u64) -> Result<Option<UblkCtrl>> {
    let control = builder(number, identity)?
        .dev_flags(UblkFlags::UBLK_DEV_F_RECOVER_DEV)
        .build()
        .map_err(|error| failed(number, "find", &error))?;
    let info = control.dev_info();
    if info.ublksrv_flags != identity {
        return Err(Error::Conflict(format!(
            "/dev/ublkb{number} belongs to somebody else"
        )));
    }
    if u32::from(info.state) == sys::UBLK_S_DEV_DEAD {
        control
            .del_dev()
            .map_err(|error| failed(number, "delete", &error))?;
        return Ok(None);
    }
    // Waits until the kernel has noticed the end of the process that served it.
    checked(control.start_user_recover()).map_err(|error| failed(number, "take back", &error))?;
    Ok(Some(control))
}

/// Remove what a daemon before us left of `/dev/ublkb<number>`. That there is nothing, or somebody else's, is no error.
///
/// # Errors
/// `Io`.
pub fn remove_left(device: &str, number: u32) -> Result<()> {
    if !device_exists(number) {
        return Ok(());
    }
    let control = builder(number, 0)?
        .dev_flags(UblkFlags::UBLK_DEV_F_RECOVER_DEV)
        .build()
        .map_err(|error| failed(number, "find", &error))?;
    if control.dev_info().ublksrv_flags != identity_of(device) {
        return Ok(());
    }
    // Requests that wait in it fail.
    let stopped = checked(control.stop_dev());
    stopped
        .and(control.del_dev_async().map(|_| ()))
        .map_err(|error| failed(number, "remove", &error))
}

fn launch(target: Target, control: UblkCtrl, number: u32) -> Result<Ublk> {
    let info = control.dev_info();
    let record = ExportRecord::Ublk {
        queues: info.nr_hw_queues,
        depth: info.queue_depth,
        number,
    };
    let describe = |device: &mut UblkDev| {
        device.tgt.dev_size = target.backend.size();
        device.tgt.params = parameters(target.backend.as_ref(), info.max_io_buf_bytes);
        // One more than requests: the queue also waits for its mailbox.
        device.tgt.sq_depth = info.queue_depth.saturating_add(1);
        device.tgt.cq_depth = info.queue_depth.saturating_add(1);
        Ok(())
    };
    let device = UblkDev::new("aenv".into(), describe, &control)
        .map_err(|error| failed(number, "open", &error))?;
    let mut export = Ublk {
        record,
        backend: Arc::clone(&target.backend),
        number,
        device: Some(Arc::new(device)),
        queues: Vec::new(),
        serving: Arc::default(),
        control,
    };
    match export.start_serving(&target) {
        Ok(()) => {
            // From here on the device ends only with `stop`.
            export.control.disown();
            Ok(export)
        }
        Err(error) => {
            // Dropping the control then removes a device that we added.
            export.end_queues();
            Err(error)
        }
    }
}

fn parameters(backend: &dyn BlockBackend, request_bytes: u32) -> sys::ublk_params {
    let mut attributes = sys::UBLK_ATTR_VOLATILE_CACHE | sys::UBLK_ATTR_FUA;
    if backend.is_read_only() {
        attributes |= sys::UBLK_ATTR_READ_ONLY;
    }
    let mut parameters = sys::ublk_params {
        types: sys::UBLK_PARAM_TYPE_BASIC,
        ..Default::default()
    };
    parameters.basic = sys::ublk_param_basic {
        attrs: attributes,
        logical_bs_shift: LOGICAL_SHIFT,
        physical_bs_shift: PHYSICAL_SHIFT,
        io_opt_shift: PHYSICAL_SHIFT,
        io_min_shift: PHYSICAL_SHIFT,
        max_sectors: request_bytes >> LOGICAL_SHIFT,
        dev_sectors: backend.size() / SECTOR,
        ..Default::default()
    };
    if !backend.is_read_only() {
        parameters.types |= sys::UBLK_PARAM_TYPE_DISCARD;
        parameters.discard = sys::ublk_param_discard {
            discard_granularity: 1 << PHYSICAL_SHIFT,
            max_discard_sectors: ZEROED_SECTORS,
            max_write_zeroes_sectors: ZEROED_SECTORS,
            max_discard_segments: 1,
            ..Default::default()
        };
    }
    parameters
}

struct Queue {
    mailbox: Arc<Mailbox>,
    thread: JoinHandle<()>,
}

struct Ublk {
    record: ExportRecord,
    backend: Arc<dyn BlockBackend>,
    number: u32,
    /// `None` when it is closed; the kernel lets nobody else serve the device before.
    device: Option<Arc<UblkDev>>,
    queues: Vec<Queue>,
    serving: Arc<AtomicUsize>,
    control: UblkCtrl,
}

impl Ublk {
    fn start_serving(&mut self, target: &Target) -> Result<()> {
        let Some(device) = self.device.clone() else {
            return Err(Error::Internal(
                "a closed ublk device cannot be started".into(),
            ));
        };
        let (ready, waiting) = mpsc::channel();
        for id in 0..device.dev_info.nr_hw_queues {
            let queue = self
                .start_queue(id, &device, target.clone(), ready.clone())
                .map_err(|error| {
                    Error::io(format!("/dev/ublkb{}: queue {id}", self.number), &error)
                })?;
            self.queues.push(queue);
        }
        drop(ready);
        for result in waiting.iter().take(self.queues.len()) {
            result.map_err(|message| Error::Io(format!("/dev/ublkb{}: {message}", self.number)))?;
        }
        checked(self.control.start_dev(&device))
            .map_err(|error| failed(self.number, "start", &error))
    }

    fn start_queue(
        &self,
        id: u16,
        device: &Arc<UblkDev>,
        target: Target,
        ready: mpsc::Sender<std::result::Result<(), String>>,
    ) -> io::Result<Queue> {
        let mailbox = Arc::new(Mailbox::new()?);
        let (device, serving) = (Arc::clone(device), Arc::clone(&self.serving));
        let number = self.number;
        let thread = std::thread::Builder::new()
            .name(format!("ublk{number}.{id}"))
            .stack_size(THREAD_STACK)
            .spawn({
                let mailbox = Arc::clone(&mailbox);
                move || {
                    UblkCtrl::init_queue_thread();
                    serving.fetch_add(1, Ordering::Relaxed);
                    let serve = || {
                        queue::serve(id, &device, &target, &mailbox, || {
                            // Whoever waits for it may have given up.
                            let _ = ready.send(Ok(()));
                        })
                    };
                    let message = match catch_unwind(AssertUnwindSafe(serve)) {
                        Ok(Ok(())) => None,
                        Ok(Err(error)) => Some(error.to_string()),
                        Err(_) => Some("it panicked".into()),
                    };
                    if let Some(message) = message {
                        tracing::error!(device = %target.device, number, queue = id, %message, "a queue ended");
                        let _ = ready.send(Err(format!("queue {id}: {message}")));
                    }
                    serving.fetch_sub(1, Ordering::Relaxed);
                }
            })?;
        Ok(Queue { mailbox, thread })
    }

    /// Ends the queues and closes the device. Requests that wait stay with the kernel.
    fn end_queues(&mut self) {
        for queue in &self.queues {
            queue.mailbox.detach();
        }
        self.join_queues();
    }

    fn join_queues(&mut self) {
        for queue in self.queues.drain(..) {
            // Panics were caught inside.
            let _ = queue.thread.join();
        }
        self.device = None;
    }
}

impl Export for Ublk {
    fn record(&self) -> &ExportRecord {
        &self.record
    }

    fn connections(&self) -> usize {
        self.serving.load(Ordering::Relaxed)
    }

    fn resized(&self) -> Result<()> {
        prepare_thread().map_err(|error| failed(self.number, "resize", &error))?;
        checked(self.control.update_size(self.backend.size())).map_err(|error| {
            Error::Unsupported(format!(
                "/dev/ublkb{} keeps its size: growing it needs Linux 6.16 or newer ({error})",
                self.number
            ))
        })
    }

    fn stop(mut self: Box<Self>, how: Stop) -> Result<()> {
        if how == Stop::Detach {
            self.end_queues();
            return Ok(());
        }
        // The queues answer what is in flight and end when the kernel tells them so.
        let stopped = prepare_thread().and_then(|()| checked(self.control.stop_dev()));
        if stopped.is_err() {
            self.end_queues();
        }
        self.join_queues();
        // Without waiting: somebody may have the device open for as long as he likes.
        stopped
            .and_then(|()| self.control.del_dev_async())
            .map(|_| ())
            .map_err(|error| failed(self.number, "remove", &error))
    }
}

/// Gives this thread the ring over which the library talks to the kernel. It does so by itself only for the thread that
/// makes a control.
fn prepare_thread() -> std::result::Result<(), UblkError> {
    ublk_init_ctrl_task_ring(|ring| {
        if ring.is_none() {
            *ring = Some(IoUring::<Entry128>::builder().build(CONTROL_RING)?);
        }
        Ok(())
    })
}

/// The library reports "busy" as a success with a negative result.
fn checked(result: std::result::Result<i32, UblkError>) -> std::result::Result<(), UblkError> {
    match result {
        Ok(code) if code < 0 => Err(UblkError::UringIOError(code)),
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

fn errno_of(error: &UblkError) -> Option<i32> {
    match error {
        UblkError::UringIOError(code) | UblkError::OtherError(code) => Some(code.abs()),
        UblkError::IOError(error) => error.raw_os_error(),
        _ => None,
    }
}

fn failed(number: u32, action: &str, error: &UblkError) -> Error {
    let path = PathBuf::from(format!("/dev/ublkb{number}"));
    let reason = errno_of(error).map_or_else(
        || error.to_string(),
        |code| io::Error::from_raw_os_error(code).to_string(),
    );
    Error::Io(format!("cannot {action} {}: {reason}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_stable_and_differ() {
        assert_eq!(identity_of(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(identity_of("a"), 0xaf63_dc4c_8601_ec8c);
        assert_ne!(identity_of("i1"), identity_of("i2"));
    }

    #[test]
    fn a_host_without_the_driver_is_told_apart() {
        if Path::new(CONTROL).exists() {
            return;
        }
        let error = check_host().unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
        assert!(error.to_string().contains("ublk_drv"), "{error}");
        assert!(free_number(&[]).is_err());
    }
}
