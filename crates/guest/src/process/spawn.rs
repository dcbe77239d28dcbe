//! Starts a command with one `clone3`, like `vfork`: the child borrows our memory until it executes the program.
//!
//! The standard library's way would copy our page tables, and could neither put the child into its cgroup from the
//! first instruction nor give us a pidfd that cannot be mistaken. The price is that the child may only make system
//! calls: no allocation, no lock, no panic. Everything it needs is prepared before.

use std::{
    ffi::{c_char, c_int, c_uint, c_void, CStr, CString},
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use super::{
    clone::{self, CloneArgs, Stack},
    command::Command,
    wait,
};

/// What a shell answers when there is no such program, and when it cannot be executed.
const NOT_FOUND: c_int = 127;
const NOT_EXECUTABLE: c_int = 126;
/// The kernel's number of signals.
const SIGNALS: c_int = 64;
static DEFAULT_ACTION: [u64; 4] = [0; 4];

/// The three standard streams of a child.
pub struct Streams<'a> {
    pub stdin: BorrowedFd<'a>,
    pub stdout: BorrowedFd<'a>,
    pub stderr: BorrowedFd<'a>,
    /// Standard input is a terminal that becomes the controlling one.
    pub terminal: bool,
}

/// A child that has executed its program, or has failed to and is about to end with a shell's exit code.
pub struct Spawned {
    pub pid: u32,
    pub pidfd: OwnedFd,
}

/// Starts `command` with `streams`, in `cgroup` if given, with `files_limit` as its limit of open files.
///
/// The child has a session of its own, default signal dispositions, an empty signal mask, umask 022, nice 0, OOM score
/// 0, and no descriptor besides the three. A program that cannot be executed is no error: like under a shell the child
/// says so on its standard error and ends with 127 or 126. Blocks until the program runs.
pub fn spawn(
    command: &Command,
    streams: &Streams<'_>,
    cgroup: Option<BorrowedFd<'_>>,
    files_limit: libc::rlimit,
) -> io::Result<Spawned> {
    let argv = pointers(&command.argv);
    // `/bin/sh <program> <arguments…>`; the program's place is filled when it is known.
    let mut shell_argv = vec![SHELL.as_ptr(), ptr::null()];
    shell_argv.extend_from_slice(&argv[1..]);
    let env = pointers(&command.env);
    let messages = Messages::new(&command.argv[0]);
    let mut plan = Plan {
        command,
        argv: &argv,
        shell_argv,
        env: &env,
        stdio: [
            streams.stdin.as_raw_fd(),
            streams.stdout.as_raw_fd(),
            streams.stderr.as_raw_fd(),
        ],
        terminal: streams.terminal,
        files_limit,
        messages: &messages,
        failure: None,
    };
    let stack = Stack::new()?;
    let mut pidfd: RawFd = -1;
    let args = CloneArgs::vfork(&stack, &mut pidfd, cgroup);
    // A signal handler must not run in the child, on our memory.
    let blocked = SignalsBlocked::new()?;
    // SAFETY: `child` only makes system calls and never returns; `plan`, `stack` and what they point to outlive the
    // call, which returns only when the child has left our memory.
    let result = unsafe { clone::clone3(&args, child, (&raw mut plan).cast()) };
    drop(blocked);
    let pid = result?;
    // SAFETY: the kernel has just given us this descriptor.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    if let Some((step, errno)) = plan.failure {
        wait::reap(&pidfd)?;
        let cause = io::Error::from_raw_os_error(errno);
        return Err(io::Error::new(cause.kind(), format!("{step}: {cause}")));
    }
    Ok(Spawned { pid, pidfd })
}

const SHELL: &CStr = c"/bin/sh";

/// What the child reads, and the one thing that it writes.
struct Plan<'a> {
    command: &'a Command,
    argv: &'a [*const c_char],
    shell_argv: Vec<*const c_char>,
    env: &'a [*const c_char],
    stdio: [RawFd; 3],
    terminal: bool,
    files_limit: libc::rlimit,
    messages: &'a Messages,
    /// The step that failed before the program could be executed, and its errno.
    failure: Option<(&'static str, c_int)>,
}

/// What is printed for a program that cannot be executed.
struct Messages {
    missing: Vec<u8>,
    denied: Vec<u8>,
    too_long: Vec<u8>,
    other: Vec<u8>,
}

impl Messages {
    fn new(cmd: &CStr) -> Self {
        let line = |text: &str| [cmd.to_bytes(), b": ", text.as_bytes(), b"\n"].concat();
        let missing = if cmd.to_bytes().contains(&b'/') {
            "No such file or directory"
        } else {
            "command not found"
        };
        Self {
            missing: line(missing),
            denied: line("Permission denied"),
            too_long: line("Argument list too long"),
            other: line("cannot execute"),
        }
    }
}

/// The null-terminated array of pointers that `execve` wants.
fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings
        .iter()
        .map(|string| string.as_ptr())
        .chain([ptr::null()])
        .collect()
}

/// Runs in the child, on memory that it shares with us.
unsafe extern "C" fn child(plan: *mut c_void) -> ! {
    // SAFETY: `spawn` passes a live plan and waits; nobody else looks at it meanwhile.
    let plan = unsafe { &mut *plan.cast::<Plan>() };
    // SAFETY: only system calls with prepared arguments, as `prepare` and `execute` promise.
    unsafe {
        match prepare(plan) {
            Ok(()) => execute(plan),
            Err(failure) => {
                plan.failure = Some(failure);
                libc::_exit(NOT_FOUND)
            }
        }
    }
}

fn errno() -> c_int {
    // SAFETY: the location is always valid. It is the variable of the thread that waits for us.
    unsafe { *libc::__errno_location() }
}

fn check(step: &'static str, result: libc::c_long) -> Result<(), (&'static str, c_int)> {
    if result == -1 {
        Err((step, errno()))
    } else {
        Ok(())
    }
}

/// Makes the child what a command is, in the one order that works: privileges go last.
unsafe fn prepare(plan: &Plan<'_>) -> Result<(), (&'static str, c_int)> {
    // SAFETY: system calls only; every pointer is into `plan` or static. Users and groups are set by raw calls because
    // the C library's would change all threads of the agent, whose memory this is.
    unsafe {
        // The C library would refuse the signals that it keeps for itself, so the kernel is asked; all zero is the
        // default disposition in its `struct sigaction`. It refuses SIGKILL and SIGSTOP, rightly.
        for signal in 1..=SIGNALS {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                DEFAULT_ACTION.as_ptr(),
                ptr::null::<u64>(),
                size_of::<u64>(),
            );
        }
        // A descriptor of ours is never below 3, so none is overwritten before it is copied.
        for (target, source) in plan.stdio.iter().enumerate() {
            check("dup2", libc::dup2(*source, target as c_int).into())?;
        }
        // Ours are all close-on-exec, but whoever started us may have left us others.
        libc::syscall(
            libc::SYS_close_range,
            3,
            c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
        check("setsid", libc::setsid().into())?;
        if plan.terminal {
            check("TIOCSCTTY", libc::ioctl(0, libc::TIOCSCTTY, 0).into())?;
        }
        libc::umask(0o022);
        // Best effort: without /proc or privileges the child keeps what it has.
        libc::setpriority(libc::PRIO_PROCESS, 0, 0);
        let score = libc::open(
            c"/proc/self/oom_score_adj".as_ptr(),
            libc::O_WRONLY | libc::O_CLOEXEC,
        );
        if score >= 0 {
            libc::write(score, c"0".as_ptr().cast(), 1);
            libc::close(score);
        }
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const plan.files_limit);

        let user = &plan.command.user;
        let groups = &user.groups;
        check(
            "setgroups",
            libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()),
        )?;
        check("setgid", libc::syscall(libc::SYS_setgid, user.gid))?;
        check("setuid", libc::syscall(libc::SYS_setuid, user.uid))?;
        check("chdir", libc::chdir(plan.command.cwd.as_ptr()).into())?;

        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        check(
            "sigprocmask",
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()).into(),
        )
    }
}

/// Executes the first program that exists, else ends as a shell would.
unsafe fn execute(plan: &mut Plan<'_>) -> ! {
    let mut denied = false;
    // SAFETY: system calls only; the arrays are null-terminated and point to live strings.
    unsafe {
        for program in &plan.command.programs {
            libc::execve(program.as_ptr(), plan.argv.as_ptr(), plan.env.as_ptr());
            match errno() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => denied = true,
                libc::E2BIG => complain(&plan.messages.too_long, NOT_EXECUTABLE),
                libc::ENOEXEC => {
                    // A script without a first line that names its interpreter.
                    plan.shell_argv[1] = program.as_ptr();
                    libc::execve(SHELL.as_ptr(), plan.shell_argv.as_ptr(), plan.env.as_ptr());
                    complain(&plan.messages.other, NOT_EXECUTABLE)
                }
                _ => complain(&plan.messages.other, NOT_EXECUTABLE),
            }
        }
        if denied {
            complain(&plan.messages.denied, NOT_EXECUTABLE)
        }
        complain(&plan.messages.missing, NOT_FOUND)
    }
}

unsafe fn complain(message: &[u8], code: c_int) -> ! {
    // SAFETY: system calls on a live buffer.
    unsafe {
        libc::write(2, message.as_ptr().cast(), message.len());
        libc::_exit(code)
    }
}

/// Blocks all signals of this thread while it lives.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> io::Result<Self> {
        // SAFETY: both sets are plain data that the calls fill.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            match libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) {
                0 => Ok(Self(before)),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set was filled by the kernel; setting a mask that was set before cannot fail.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut());
        }
    }
}
