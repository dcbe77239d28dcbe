//! One process that we started: launching it, feeding it, signalling it, and seeing it to its end.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc, Mutex, PoisonError,
    },
    time::Instant,
};

use serde_json::json;
use tokio::{io::unix::AsyncFd, time::sleep_until};

use super::{
    command::Command,
    output::{Chunk, Fanout, Source},
    pty::{Pty, Size},
    spawn::{spawn, Streams},
    stream::{Stream, MAX_CHUNK},
    wait,
};
use crate::{
    agent::{cgroup::CommandCgroup, log, state::AgentState},
    proto::process::{process_event::EndEvent, ProcessInfo},
    rpc::{Code, RpcError, RpcResult},
};

/// A terminal hands out no more than this at once.
const PTY_CHUNK: usize = 16 << 10;

/// Where a process reads from.
pub enum Wanted {
    /// A pipe that we write to.
    Pipe,
    /// `/dev/null`.
    Nothing,
    /// A terminal, of this size if the client names one; output goes there, too.
    Terminal(Option<Size>),
}

/// What can be written to.
enum Input {
    /// `None` once it is closed.
    Pipe(tokio::sync::Mutex<Option<Stream>>),
    Nothing,
    Terminal(Arc<Pty>),
}

/// Where output comes from.
enum Output {
    Pipes { stdout: Stream, stderr: Stream },
    Terminal(Arc<Pty>),
}

/// A process from its start until its `end` was sent.
pub struct Process {
    pub info: ProcessInfo,
    pub output: Arc<Fanout>,
    input: Input,
    pidfd: AsyncFd<OwnedFd>,
    cgroup: Mutex<Option<CommandCgroup>>,
    over: AtomicBool,
}

/// A process whose output nobody reads yet.
pub struct Launched {
    pub process: Arc<Process>,
    output: Output,
}

/// Starts `command`. Blocks, and needs a tokio context, so call it on a blocking thread of the runtime.
///
/// Fails with `internal` when the kernel gives no process, pipe or terminal, with `invalid_argument` when the user may
/// not enter the working directory.
pub fn launch(
    state: &AgentState,
    command: &Command,
    wanted: Wanted,
    info: ProcessInfo,
) -> RpcResult<Launched> {
    let failed = |what: &'static str| {
        move |error: io::Error| {
            RpcError::new(
                Code::Internal,
                format!("cannot start the process: {what}: {error}"),
            )
        }
    };
    let cgroup = state
        .host
        .cgroups
        .as_ref()
        .map(|cgroups| cgroups.create())
        .transpose()
        .map_err(failed("cgroup"))?;
    let launched =
        connect_and_spawn(state, command, wanted, info, cgroup.as_ref()).map_err(|error| {
            if error.kind() == io::ErrorKind::PermissionDenied
                && error.to_string().starts_with("chdir")
            {
                let cwd = command.cwd.to_string_lossy();
                return RpcError::new(
                    Code::InvalidArgument,
                    format!(
                        "cwd '{cwd}' cannot be entered by user '{}'",
                        command.user.name
                    ),
                );
            }
            failed("spawn")(error)
        });
    match (launched, cgroup) {
        (Ok(launched), cgroup) => {
            *launched.process.cgroup() = cgroup;
            Ok(launched)
        }
        (Err(error), cgroup) => {
            if let (Some(cgroups), Some(cgroup)) = (&state.host.cgroups, cgroup) {
                cgroups.release(cgroup);
            }
            Err(error)
        }
    }
}

fn connect_and_spawn(
    state: &AgentState,
    command: &Command,
    wanted: Wanted,
    mut info: ProcessInfo,
    cgroup: Option<&CommandCgroup>,
) -> io::Result<Launched> {
    let cgroup = cgroup.map(AsFd::as_fd);
    let limit = state.host.files_limit;
    let (input, output, spawned) = match wanted {
        Wanted::Terminal(size) => {
            let (pty, theirs) = Pty::open(size, &command.user)?;
            let pty = Arc::new(pty);
            let streams = Streams {
                stdin: theirs.as_fd(),
                stdout: theirs.as_fd(),
                stderr: theirs.as_fd(),
                terminal: true,
            };
            let spawned = spawn(command, &streams, cgroup, limit)?;
            (
                Input::Terminal(Arc::clone(&pty)),
                Output::Terminal(pty),
                spawned,
            )
        }
        Wanted::Pipe | Wanted::Nothing => {
            let (input, stdin) = match wanted {
                Wanted::Pipe => {
                    let (ours, theirs) = Stream::to_child()?;
                    (Input::Pipe(tokio::sync::Mutex::new(Some(ours))), theirs)
                }
                _ => (Input::Nothing, OwnedFd::from(fs::File::open("/dev/null")?)),
            };
            let (stdout, stdout_theirs) = Stream::from_child()?;
            let (stderr, stderr_theirs) = Stream::from_child()?;
            let streams = Streams {
                stdin: stdin.as_fd(),
                stdout: stdout_theirs.as_fd(),
                stderr: stderr_theirs.as_fd(),
                terminal: false,
            };
            let spawned = spawn(command, &streams, cgroup, limit)?;
            (input, Output::Pipes { stdout, stderr }, spawned)
        }
    };
    info.pid = spawned.pid;
    // SAFETY: an owned descriptor stays open, and the same one, until it is dropped with its registration.
    let pidfd = unsafe { AsyncFd::register(spawned.pidfd)? };
    let process = Arc::new(Process {
        info,
        output: Arc::default(),
        input,
        pidfd,
        cgroup: Mutex::new(None),
        over: AtomicBool::new(false),
    });
    Ok(Launched { process, output })
}

impl Launched {
    /// Reads all output and waits for the end; kills the process at `deadline`. Returns when the process is reaped
    /// *and* nobody holds its output streams any more, with the message that says so.
    ///
    /// Must run to its end whether or not any client is there.
    pub async fn supervise(self, state: &AgentState, deadline: Option<Instant>) -> EndEvent {
        let Launched { process, output } = self;
        let exit = process.wait(deadline);
        let exit = match output {
            Output::Pipes { stdout, stderr } => {
                tokio::join!(
                    exit,
                    process.pump(Source::Stdout, || stdout.read_chunk(MAX_CHUNK)),
                    process.pump(Source::Stderr, || stderr.read_chunk(MAX_CHUNK)),
                )
                .0
            }
            Output::Terminal(pty) => {
                tokio::join!(
                    exit,
                    process.pump(Source::Pty, || pty.read_chunk(PTY_CHUNK))
                )
                .0
            }
        };
        if let (Some(cgroups), Some(cgroup)) = (&state.host.cgroups, process.cgroup().take()) {
            cgroups.release(cgroup);
        }
        exit
    }
}

impl Process {
    fn cgroup(&self) -> std::sync::MutexGuard<'_, Option<CommandCgroup>> {
        self.cgroup.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the process itself is over; its children may still write to its output.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    async fn wait(&self, deadline: Option<Instant>) -> EndEvent {
        let started = Instant::now();
        let expired = async {
            match deadline {
                Some(deadline) => sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        let exit = wait::exit(&self.pidfd);
        tokio::pin!(exit);
        let exit = tokio::select! {
            biased;
            exit = &mut exit => exit,
            () = expired => {
                log::info("the time of a process is over", json!({"pid": self.info.pid}));
                if let Err(error) = self.kill() {
                    log::warn(
                        "cannot kill a process whose time is over",
                        json!({"pid": self.info.pid, "error": error.to_string()}),
                    );
                }
                exit.await
            }
        };
        self.over.store(true, Ordering::Release);
        let end = match exit {
            Ok(exit) => exit.event(),
            // Only a bug of ours could bring us here; the client must get an end all the same.
            Err(error) => EndEvent {
                exit_code: -1,
                exited: false,
                status: "unknown".into(),
                error: Some(format!("cannot wait for the process: {error}")),
            },
        };
        log::info(
            "process ended",
            json!({
                "pid": self.info.pid,
                "status": end.status,
                "seconds": started.elapsed().as_secs_f64(),
            }),
        );
        end
    }

    async fn pump<F>(&self, source: Source, mut read: impl FnMut() -> F)
    where
        F: std::future::Future<Output = io::Result<bytes::Bytes>>,
    {
        loop {
            match read().await {
                Ok(data) if data.is_empty() => return,
                Ok(data) => self.output.publish(Chunk { source, data }).await,
                Err(error) => {
                    log::warn(
                        "cannot read the output of a process",
                        json!({"pid": self.info.pid, "error": error.to_string()}),
                    );
                    return;
                }
            }
        }
    }

    /// Kills the process and everything in its cgroup; without a cgroup the process only.
    pub fn kill(&self) -> io::Result<()> {
        if let Some(cgroup) = &*self.cgroup() {
            // Kernels before 5.14 have no such file.
            if cgroup.kill().is_ok() {
                return Ok(());
            }
        }
        wait::send_signal(&self.pidfd, libc::SIGKILL)
    }

    /// Asks the process itself to end.
    pub fn terminate(&self) -> io::Result<()> {
        wait::send_signal(&self.pidfd, libc::SIGTERM)
    }

    /// Writes to the stdin pipe, in the order of the calls. Waits while the process does not read.
    pub async fn write_stdin(&self, bytes: &[u8]) -> RpcResult<()> {
        let Input::Pipe(pipe) = &self.input else {
            return Err(internal(match self.input {
                Input::Terminal(_) => "the process has a terminal: send pty input, not stdin",
                _ => "stdin of the process is not enabled",
            }));
        };
        match &*pipe.lock().await {
            None => Err(internal("stdin of the process is closed")),
            Some(stream) => stream.write_all(bytes).await.map_err(write_failed),
        }
    }

    /// Types into the terminal.
    pub async fn write_pty(&self, bytes: &[u8]) -> RpcResult<()> {
        match &self.input {
            Input::Terminal(pty) => pty.write_all(bytes).await.map_err(write_failed),
            _ => Err(internal("the process has no terminal")),
        }
    }

    /// Closes the stdin pipe after what was written before; closing it again is fine.
    pub async fn close_stdin(&self) -> RpcResult<()> {
        match &self.input {
            Input::Pipe(pipe) => {
                pipe.lock().await.take();
                Ok(())
            }
            Input::Nothing => Ok(()),
            Input::Terminal(_) => Err(RpcError::new(
                Code::Unknown,
                "stdin of a terminal cannot be closed: send the byte 0x04 instead",
            )),
        }
    }

    /// Sets the size of the terminal.
    pub fn resize(&self, size: Size) -> RpcResult<()> {
        match &self.input {
            Input::Terminal(pty) => pty
                .resize(size)
                .map_err(|error| internal(format!("cannot resize the terminal: {error}"))),
            _ => Err(internal("the process has no terminal")),
        }
    }
}

fn internal(message: impl Into<String>) -> RpcError {
    RpcError::new(Code::Internal, message)
}

fn write_failed(error: io::Error) -> RpcError {
    internal(match error.kind() {
        io::ErrorKind::BrokenPipe => "the process has closed its stdin".to_owned(),
        _ => format!("cannot write to the process: {error}"),
    })
}
