//! `aenv-blockd`: arguments, signals, and the end. docs/blockd.md says what it does.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;

use blockd::daemon::Daemon;
use blockd::error::{Error, Result};
use blockd::protocol::Server;

const USAGE: &str = "\
usage: aenv-blockd serve --state DIR --socket PATH
       aenv-blockd --version";

enum Command {
    Serve { state: PathBuf, socket: PathBuf },
    Version,
    Help,
}

fn main() -> ExitCode {
    match parse(std::env::args_os().skip(1)) {
        Ok(Command::Version) => {
            println!("aenv-blockd {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Ok(Command::Help) => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        Ok(Command::Serve { state, socket }) => {
            return_large_buffers();
            blockd::log::start();
            match serve(&state, &socket) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    tracing::error!(code = error.code(), "{error}");
                    ExitCode::FAILURE
                }
            }
        }
        Err(message) => {
            eprintln!("{message}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = OsString>) -> std::result::Result<Command, String> {
    let command = arguments.next();
    match command.as_ref().and_then(|command| command.to_str()) {
        Some("serve") => {}
        Some("--version") => return Ok(Command::Version),
        Some("--help" | "-h") => return Ok(Command::Help),
        _ => return Err("a command is missing or unknown".into()),
    }
    let (mut state, mut socket) = (None, None);
    while let Some(option) = arguments.next() {
        let place = match option.to_str() {
            Some("--state") => &mut state,
            Some("--socket") => &mut socket,
            _ => return Err(format!("unknown option {}", option.to_string_lossy())),
        };
        let value = arguments
            .next()
            .ok_or_else(|| format!("{} needs a value", option.to_string_lossy()))?;
        *place = Some(PathBuf::from(value));
    }
    match (state, socket) {
        (Some(state), Some(socket)) => Ok(Command::Serve { state, socket }),
        _ => Err("--state and --socket are needed".into()),
    }
}

fn serve(state: &std::path::Path, socket: &std::path::Path) -> Result<()> {
    let failed = |error| Error::io("prepare for signals", &error);
    let (mut ended, end) = UnixStream::pair().map_err(failed)?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let end = end.try_clone().map_err(failed)?;
        signal_hook::low_level::pipe::register(signal, end).map_err(failed)?;
    }
    raise_file_limit();
    let socket = std::path::absolute(socket)
        .map_err(|error| Error::io(format_args!("make sense of {}", socket.display()), &error))?;
    let daemon = Daemon::start(state)?;
    let server = Server::bind(&socket, daemon.clone(), move || {
        // The pair lives as long as the process.
        let _ = (&end).write_all(&[0]);
    })?;
    std::thread::Builder::new()
        .name("listen".into())
        .spawn(move || server.run())
        .map_err(|error| Error::io("start listening", &error))?;
    tracing::info!(socket = %socket.display(), state = %state.display(), "ready");
    let mut byte = [0];
    ended.read_exact(&mut byte).map_err(failed)?;
    tracing::info!("ending");
    daemon.end();
    if let Err(error) = blockd::socket::unlink(&socket) {
        tracing::warn!(%error, "the control socket stays");
    }
    Ok(())
}

/// Have the allocator give buffers of connections back to the kernel when they are freed. By default it keeps what was freed
/// once, which with thousands of idle clients is most of the daemon's memory.
#[cfg(target_env = "gnu")]
fn return_large_buffers() {
    // SAFETY: sets a number of the allocator; no other thread runs yet.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024) };
}

#[cfg(not(target_env = "gnu"))]
fn return_large_buffers() {}

/// Every device, layer and client takes descriptors.
fn raise_file_limit() {
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}
