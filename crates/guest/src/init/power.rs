//! The end of the machine: ask every process to end, flush the disk, tell the kernel.

use std::time::{Duration, Instant};

use nix::{
    errno::Errno,
    sys::{
        reboot::{reboot, RebootMode},
        signal::{kill, Signal},
        wait::{waitpid, WaitPidFlag, WaitStatus},
    },
    unistd::{sync, Pid},
};

use super::{cmdline::PowerOffCall, log, mounts, supervise};

/// How long processes may take between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(2);
const KILLED: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    PowerOff,
    Reboot,
}

/// Ends the machine after letting processes end and writing everything to the disk.
pub fn shut_down(ending: Ending, call: PowerOffCall, signals: &mut supervise::Signals) -> ! {
    log::info("shutting down");
    let everyone = Pid::from_raw(-1);
    for (signal, patience) in [(Signal::SIGTERM, GRACE), (Signal::SIGKILL, KILLED)] {
        if kill(everyone, signal) == Err(Errno::ESRCH)
            || all_ended(signals, Instant::now() + patience)
        {
            break;
        }
    }
    sync();
    mounts::unmount_all();
    end(ending, call)
}

/// Ends the machine at once. Used directly when booting failed and nothing runs yet.
pub fn end(ending: Ending, call: PowerOffCall) -> ! {
    sync();
    let mode = match (ending, call) {
        (Ending::Reboot, _) | (_, PowerOffCall::Reset) => RebootMode::RB_AUTOBOOT,
        (Ending::PowerOff, PowerOffCall::PowerOff) => RebootMode::RB_POWER_OFF,
    };
    let Err(error) = reboot(mode);
    log::error(&format!("the kernel refused to end the machine: {error}"));
    loop {
        // PID 1 must not return, and nothing is left to wait for.
        // SAFETY: pause takes no argument and touches no memory of ours.
        unsafe { libc::pause() };
    }
}

/// Waits until no child is left; orphans become children of PID 1, so that means every process of the guest.
fn all_ended(signals: &mut supervise::Signals, deadline: Instant) -> bool {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Err(Errno::ECHILD) => return true,
            Ok(WaitStatus::StillAlive) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() || signals.wait(Some(left)).is_err() {
                    return false;
                }
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}
