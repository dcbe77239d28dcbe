//! Keeps the agent running and reaps every orphan. All signals arrive as data, none as interruptions.
//!
//! The agent is a child of its own, so `waitpid(-1)` here never takes the exit code of a command that the agent runs.

use std::{
    ffi::{c_char, CString},
    io,
    net::Ipv4Addr,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    ptr,
    time::{Duration, Instant},
};

use anyhow::Result;
use nix::{
    errno::Errno,
    fcntl::{open, OFlag},
    poll::{poll, PollFd, PollFlags, PollTimeout},
    sys::{
        reboot::set_cad_enabled,
        signal::{sigprocmask, SigSet, SigmaskHow},
        signalfd::{SfdFlags, SignalFd},
        stat::Mode,
        wait::{waitpid, WaitPidFlag, WaitStatus},
    },
    unistd::Pid,
};

use super::{
    button::PowerButton,
    cmdline::{BootConfig, PowerOffCall},
    log,
    net::INTERFACE,
    power::{self, Ending},
};

const AGENT_PORT: u16 = 49983;
const READY_PORT: u16 = 49980;
const ENVIRONMENT: [&std::ffi::CStr; 2] = [
    c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    c"HOME=/root",
];

/// The program that is running as init. It lies in the initramfs, whose paths end with the move into the root disk;
/// the descriptor stays good.
pub fn open_own_binary() -> Result<OwnedFd> {
    Ok(open(
        "/proc/self/exe",
        OFlag::O_PATH | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?)
}

/// Every signal of this process as something to wait for, and the power button, which counts as SIGPWR.
pub struct Signals {
    queue: SignalFd,
    button: Option<PowerButton>,
}

impl Signals {
    /// Blocks all signals, and has the kernel send SIGINT for Ctrl-Alt-Del instead of resetting the machine.
    pub fn block() -> Result<Self> {
        let all = SigSet::all();
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(&all), None)?;
        set_cad_enabled(false)?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self {
            queue: SignalFd::with_flags(&all, flags)?,
            button: None,
        })
    }

    /// Also waits for the power button, where the machine has one.
    pub fn watch_button(&mut self, button: Option<PowerButton>) {
        self.button = button;
    }

    /// Waits for one signal. None when the timeout passed first.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Option<i32>> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            if let Some(info) = self.queue.read_signal()? {
                return Ok(i32::try_from(info.ssi_signo).ok());
            }
            match self.button.as_mut().map(PowerButton::was_pressed) {
                Some(Ok(true)) => return Ok(Some(libc::SIGPWR)),
                Some(Err(_)) => self.button = None,
                Some(Ok(false)) | None => {}
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            // Rounded up, or the last fraction of a millisecond would be spent spinning.
            let timeout = left.map_or(PollTimeout::NONE, |left| {
                PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX)
            });
            let sources = [
                Some(self.queue.as_fd()),
                self.button.as_ref().map(AsFd::as_fd),
            ];
            let mut sources: Vec<PollFd> = sources
                .into_iter()
                .flatten()
                .map(|source| PollFd::new(source, PollFlags::POLLIN))
                .collect();
            match poll(&mut sources, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// When to start the agent again: at once after a life of some length, later after each short one.
#[derive(Debug, Default)]
struct Backoff {
    short_lives: u32,
}

impl Backoff {
    const LONG_LIFE: Duration = Duration::from_secs(5);
    const STEP: Duration = Duration::from_millis(20);
    const MOST: Duration = Duration::from_secs(1);

    /// The pause before the next start, after a life of this length. The first short life costs nothing either.
    fn after(&mut self, life: Duration) -> Duration {
        if life >= Self::LONG_LIFE {
            self.short_lives = 0;
            return Duration::ZERO;
        }
        let doublings = self.short_lives;
        self.short_lives = doublings.saturating_add(1);
        match doublings {
            0 => Duration::ZERO,
            count => (Self::STEP * 2u32.pow(count.min(10) - 1)).min(Self::MOST),
        }
    }
}

enum Agent {
    Running { pid: Pid, since: Instant },
    Due { at: Instant },
}

/// Owns the agent's process. `run` may be called again after a panic inside of it.
pub struct Supervisor {
    binary: OwnedFd,
    arguments: Vec<CString>,
    signals: Signals,
    power_off: PowerOffCall,
    backoff: Backoff,
    agent: Agent,
    faults: u32,
}

impl Supervisor {
    const FAULT_STEP: Duration = Duration::from_millis(10);
    const MOST_PAUSE: Duration = Duration::from_secs(1);

    pub fn new(binary: OwnedFd, signals: Signals, config: &BootConfig) -> Self {
        Self {
            binary,
            arguments: agent_arguments(config.gateway),
            signals,
            power_off: config.power_off,
            backoff: Backoff::default(),
            agent: Agent::Due { at: Instant::now() },
            faults: 0,
        }
    }

    /// Called after a panic inside of `run`: the more there were, the longer the pause, so that a fault that comes back
    /// does not keep a CPU busy.
    pub fn pause_after_fault(&mut self) {
        self.faults = self.faults.saturating_add(1);
        let pause = (Self::FAULT_STEP * self.faults.min(100)).min(Self::MOST_PAUSE);
        let _ = poll(
            &mut [],
            PollTimeout::try_from(pause).unwrap_or(PollTimeout::ZERO),
        );
    }

    /// Starts, restarts and reaps until a signal ends the machine.
    pub fn run(&mut self) -> ! {
        loop {
            self.reap();
            let timeout = match self.agent {
                Agent::Running { .. } => None,
                Agent::Due { at } => {
                    let left = at.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        self.start();
                        continue;
                    }
                    Some(left)
                }
            };
            match self.signals.wait(timeout) {
                Ok(Some(signal)) => {
                    if let Some(ending) = ending_of(signal) {
                        power::shut_down(ending, self.power_off, &mut self.signals);
                    }
                }
                Ok(None) => {}
                Err(error) => panic!("waiting for signals: {error:#}"),
            }
        }
    }

    fn start(&mut self) {
        let console = log::console().map(|file| file.as_raw_fd());
        match spawn(&self.binary, &self.arguments, console) {
            Ok(pid) => {
                log::info(&format!("agent started as process {pid}"));
                self.agent = Agent::Running {
                    pid,
                    since: Instant::now(),
                };
            }
            Err(error) => {
                log::error(&format!("the agent cannot be started: {error}"));
                self.schedule(Duration::ZERO);
            }
        }
    }

    fn schedule(&mut self, life: Duration) {
        self.agent = Agent::Due {
            at: Instant::now() + self.backoff.after(life),
        };
    }

    fn reap(&mut self) {
        loop {
            let status = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return,
                Ok(status) => status,
                Err(Errno::EINTR) => continue,
                Err(error) => return log::error(&format!("waiting for children: {error}")),
            };
            if let Agent::Running { pid, since } = self.agent {
                if status.pid() == Some(pid) {
                    log::error(&format!(
                        "the agent ended ({}), starting it again",
                        describe(status)
                    ));
                    self.schedule(since.elapsed());
                }
            }
        }
    }
}

fn describe(status: WaitStatus) -> String {
    match status {
        WaitStatus::Exited(_, code) => format!("exit code {code}"),
        WaitStatus::Signaled(_, signal, _) => signal.to_string(),
        other => format!("{other:?}"),
    }
}

/// What a signal to PID 1 asks for. Numbers above SIGRTMIN are those of systemd(1), which its `poweroff` sends;
/// SIGUSR1 and SIGUSR2 are those of BusyBox.
fn ending_of(signal: i32) -> Option<Ending> {
    match signal {
        libc::SIGTERM | libc::SIGPWR | libc::SIGUSR1 | libc::SIGUSR2 => Some(Ending::PowerOff),
        libc::SIGINT => Some(Ending::Reboot),
        other => match other - libc::SIGRTMIN() {
            3 | 4 | 13 | 14 => Some(Ending::PowerOff),
            5 | 15 => Some(Ending::Reboot),
            _ => None,
        },
    }
}

fn agent_arguments(gateway: Option<Ipv4Addr>) -> Vec<CString> {
    let mut words = vec![
        "aenv-guest".to_owned(),
        "agent".to_owned(),
        "--listen".to_owned(),
        format!("0.0.0.0:{AGENT_PORT}"),
        "--state-file".to_owned(),
        "/run/agentenv/state.json".to_owned(),
        "--cgroup".to_owned(),
        "/sys/fs/cgroup".to_owned(),
    ];
    if let Some(gateway) = gateway {
        words.extend(["--private-peer".to_owned(), gateway.to_string()]);
        words.extend(["--ready".to_owned(), format!("{gateway}:{READY_PORT}")]);
        words.extend(["--uplink".to_owned(), INTERFACE.to_owned()]);
    }
    words
        .into_iter()
        .map(|word| CString::new(word).unwrap_or_default())
        .collect()
}

/// Runs the binary in a session of its own, with no signal blocked, no input, and the console as output.
fn spawn(binary: &OwnedFd, arguments: &[CString], console: Option<RawFd>) -> io::Result<Pid> {
    let argv = null_terminated(arguments.iter().map(|word| word.as_ptr()));
    let envp = null_terminated(ENVIRONMENT.iter().map(|word| word.as_ptr()));
    let null = open_null();
    let input = null.as_ref().map(|file| file.as_raw_fd());
    // SAFETY: this process has one thread, so the child may use everything; it only makes system calls until exec.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: all pointers belong to vectors that live until exec replaces the process, or `_exit` ends it.
            unsafe {
                libc::setsid();
                for (source, target) in [(input, 0), (console, 1), (console, 2)] {
                    if let Some(source) = source {
                        libc::dup2(source, target);
                    }
                }
                libc::signal(libc::SIGPIPE, libc::SIG_DFL);
                let none = SigSet::empty();
                libc::sigprocmask(libc::SIG_SETMASK, none.as_ref(), ptr::null_mut());
                libc::syscall(
                    libc::SYS_execveat,
                    binary.as_raw_fd(),
                    c"".as_ptr(),
                    argv.as_ptr(),
                    envp.as_ptr(),
                    libc::AT_EMPTY_PATH,
                );
                libc::_exit(127)
            }
        }
        pid => Ok(Pid::from_raw(pid)),
    }
}

fn null_terminated(words: impl Iterator<Item = *const c_char>) -> Vec<*const c_char> {
    words.chain([ptr::null()]).collect()
}

fn open_null() -> Option<OwnedFd> {
    open(
        "/dev/null",
        OFlag::O_RDONLY | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
    .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_with_short_lives_to_its_bound() {
        let mut backoff = Backoff::default();
        let pauses: Vec<u128> = (0..9)
            .map(|_| backoff.after(Duration::ZERO).as_millis())
            .collect();
        assert_eq!(pauses, [0, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(backoff.after(Duration::from_secs(5)), Duration::ZERO);
        assert_eq!(backoff.after(Duration::from_millis(1)), Duration::ZERO);
        assert_eq!(
            backoff.after(Duration::from_millis(1)),
            Duration::from_millis(20)
        );
    }

    #[test]
    fn the_pause_stays_bounded_for_ever() {
        let mut backoff = Backoff {
            short_lives: u32::MAX,
        };
        assert_eq!(backoff.after(Duration::ZERO), Backoff::MOST);
        assert_eq!(backoff.after(Duration::ZERO), Backoff::MOST);
    }

    #[test]
    fn signals_end_the_machine_or_do_not() {
        assert_eq!(ending_of(libc::SIGTERM), Some(Ending::PowerOff));
        assert_eq!(ending_of(libc::SIGINT), Some(Ending::Reboot));
        assert_eq!(ending_of(libc::SIGRTMIN() + 4), Some(Ending::PowerOff));
        assert_eq!(ending_of(libc::SIGRTMIN() + 5), Some(Ending::Reboot));
        assert_eq!(ending_of(libc::SIGCHLD), None);
        assert_eq!(ending_of(libc::SIGHUP), None);
    }

    #[test]
    fn the_agent_is_told_its_peer_only_when_there_is_a_gateway() {
        let words = |gateway| -> Vec<String> {
            let arguments = agent_arguments(gateway);
            arguments
                .into_iter()
                .map(|word| word.into_string().unwrap())
                .collect()
        };
        let alone = words(None);
        assert_eq!(
            alone[..4],
            ["aenv-guest", "agent", "--listen", "0.0.0.0:49983"]
        );
        assert!(!alone.iter().any(|word| word == "--private-peer"));
        let with = words(Some(Ipv4Addr::new(169, 254, 0, 22)));
        assert_eq!(
            with[with.len() - 6..],
            [
                "--private-peer",
                "169.254.0.22",
                "--ready",
                "169.254.0.22:49980",
                "--uplink",
                "eth0"
            ]
        );
    }
}
