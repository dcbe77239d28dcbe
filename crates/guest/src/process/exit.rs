//! How a process ended, in the words that clients know from Go's `os.ProcessState`.

use crate::proto::process::process_event::EndEvent;

/// What the kernel told about the end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal { number: i32, core_dumped: bool },
}

impl Exit {
    /// The `end` message. An exit code of zero has no `error`; a signal counts as code -1.
    pub fn event(self) -> EndEvent {
        let status = self.to_string();
        EndEvent {
            exit_code: match self {
                Exit::Code(code) => code,
                Exit::Signal { .. } => -1,
            },
            exited: matches!(self, Exit::Code(_)),
            error: (self != Exit::Code(0)).then(|| status.clone()),
            status,
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Exit::Code(code) => write!(f, "exit status {code}"),
            Exit::Signal {
                number,
                core_dumped,
            } => {
                match signal_text(number) {
                    Some(text) => write!(f, "signal: {text}")?,
                    None => write!(f, "signal: signal {number}")?,
                }
                if core_dumped {
                    write!(f, " (core dumped)")?;
                }
                Ok(())
            }
        }
    }
}

fn signal_text(number: i32) -> Option<&'static str> {
    Some(match number {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGTRAP => "trace/breakpoint trap",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGUSR1 => "user defined signal 1",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGUSR2 => "user defined signal 2",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        libc::SIGSTKFLT => "stack fault",
        libc::SIGXCPU => "CPU time limit exceeded",
        libc::SIGXFSZ => "file size limit exceeded",
        libc::SIGVTALRM => "virtual timer expired",
        libc::SIGPROF => "profiling timer expired",
        libc::SIGIO => "I/O possible",
        libc::SIGPWR => "power failure",
        libc::SIGSYS => "bad system call",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signal(number: i32, core_dumped: bool) -> EndEvent {
        Exit::Signal {
            number,
            core_dumped,
        }
        .event()
    }

    #[test]
    fn codes_and_signals_have_their_words() {
        let end = Exit::Code(0).event();
        assert_eq!((end.exit_code, end.exited, end.error), (0, true, None));
        let end = Exit::Code(3).event();
        assert_eq!(end.error.as_deref(), Some("exit status 3"));
        let end = signal(9, false);
        assert_eq!(
            (end.exit_code, end.exited, end.status.as_str()),
            (-1, false, "signal: killed")
        );
        assert_eq!(
            signal(15, false).error.as_deref(),
            Some("signal: terminated")
        );
        assert_eq!(
            signal(11, true).status,
            "signal: segmentation fault (core dumped)"
        );
        assert_eq!(signal(40, false).status, "signal: signal 40");
    }
}
