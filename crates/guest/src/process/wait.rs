//! Waits for single processes through their pidfds, so that nobody else's exit code can be taken and no number mistaken.

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use tokio::io::unix::AsyncFd;

use super::exit::Exit;

/// Waits until the process is over and collects its exit; must be called once only.
pub async fn exit(pidfd: &AsyncFd<OwnedFd>) -> io::Result<Exit> {
    loop {
        let mut ready = pidfd.readable().await?;
        match collect(pidfd, libc::WNOHANG)? {
            Some(exit) => return Ok(exit),
            None => ready.clear_ready(),
        }
    }
}

/// The same for a child that is known to be about to end.
pub fn reap(pidfd: &OwnedFd) -> io::Result<()> {
    collect(pidfd, 0).map(drop)
}

fn collect(pidfd: &impl AsRawFd, options: libc::c_int) -> io::Result<Option<Exit>> {
    // SAFETY: an all-zero siginfo is valid, the call fills it.
    let mut info: libc::siginfo_t = unsafe { mem::zeroed() };
    let id = pidfd.as_raw_fd() as libc::id_t;
    loop {
        // SAFETY: `info` lives through the call.
        let result =
            unsafe { libc::waitid(libc::P_PIDFD, id, &raw mut info, libc::WEXITED | options) };
        if result == 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: waitid fills these fields, or leaves them zero when nothing has ended.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(None);
    }
    Ok(Some(match info.si_code {
        libc::CLD_EXITED => Exit::Code(status),
        code => Exit::Signal {
            number: status,
            core_dumped: code == libc::CLD_DUMPED,
        },
    }))
}

/// Sends a signal to the process itself. Fails with `NotFound` when it is over.
pub fn send_signal(pidfd: &impl AsFd, signal: libc::c_int) -> io::Result<()> {
    let fd = pidfd.as_fd().as_raw_fd();
    // SAFETY: no memory is passed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            fd,
            signal,
            std::ptr::null::<()>(),
            0,
        )
    };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(match error.raw_os_error() {
        Some(libc::ESRCH) => io::ErrorKind::NotFound.into(),
        _ => error,
    })
}
