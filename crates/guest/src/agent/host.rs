//! What the agent arranges for itself at its start so that commands cannot take it down. Best effort: each thing that
//! the kernel refuses is logged once and done without.

use std::{fs, io, ptr};

use serde_json::json;

use super::{args::Args, cgroup::Cgroups, log};

/// Above every command (0), below the kernel's own threads.
const AGENT_NICE: libc::c_int = -10;
/// Descriptors for a thousand commands with three pipes and a pidfd each, and their connections.
const WANTED_FILES: libc::rlim_t = 65_536;

/// What commands are started with.
pub struct Host {
    pub cgroups: Option<Cgroups>,
    /// The limit of open files that we were started with, for commands.
    pub files_limit: libc::rlimit,
}

/// Protects this process and prepares what commands need. Must be called before any thread is started, since nice and
/// signal mask are inherited by threads.
pub fn protect(args: &Args) -> Host {
    reset_signals();
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-1000") {
        report("the OOM killer may choose the agent", &error);
    }
    // SAFETY: no memory is passed.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, AGENT_NICE) } == -1 {
        report(
            "the agent has no precedence over commands",
            &io::Error::last_os_error(),
        );
    }
    let files_limit = raise_files_limit();
    let cgroups = args.cgroup.as_deref().and_then(|root| {
        Cgroups::set_up(root)
            .map_err(|error| report("commands run without cgroups", &error))
            .ok()
    });
    Host {
        cgroups,
        files_limit,
    }
}

fn report(what: &str, error: &io::Error) {
    log::warn(what, json!({"error": error.to_string()}));
}

/// Whoever started us may have blocked or ignored signals; an ignored SIGCHLD would lose exit codes.
fn reset_signals() {
    // SAFETY: only dispositions and the mask of this single thread change.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

/// Raises our limit of open files; returns the one that we had.
fn raise_files_limit() -> libc::rlimit {
    let mut before = libc::rlimit {
        rlim_cur: 1024,
        rlim_max: 4096,
    };
    // SAFETY: both calls take a pointer to a live rlimit.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) == -1 {
            report(
                "cannot read the limit of open files",
                &io::Error::last_os_error(),
            );
            return before;
        }
        let raised = libc::rlimit {
            rlim_cur: before.rlim_cur.max(WANTED_FILES.min(before.rlim_max)),
            rlim_max: before.rlim_max,
        };
        if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) == -1 {
            report(
                "cannot raise the limit of open files",
                &io::Error::last_os_error(),
            );
        }
    }
    before
}
