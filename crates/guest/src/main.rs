//! The program inside every sandbox. As PID 1 it is init; with the argument `agent` it is the agent that speaks the
//! envd protocol. It must run in any root file system, so it needs no file, library or tool of the image.

mod agent;
mod files;
mod init;
mod process;
mod proto;
mod rpc;
mod timestamp;

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    let mut args = env::args().skip(1);
    match args.next().as_deref() {
        _ if std::process::id() == 1 => init::main(),
        Some("init") => init::main(),
        Some("agent") => agent::main(args),
        Some("--version") => {
            println!("{}", agent::VERSION);
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("usage: aenv-guest init | agent [options] | --version");
            ExitCode::from(2)
        }
    }
}
