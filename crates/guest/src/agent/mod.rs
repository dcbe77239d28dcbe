//! The agent: the HTTP server on port 49983 that speaks the envd protocol. This file only starts it.

pub mod args;
pub mod auth;
pub mod cgroup;
pub mod connections;
pub mod cors;
pub mod descriptors;
pub mod drain;
pub mod error;
pub mod generation;
pub mod guest;
pub mod host;
pub mod init;
pub mod log;
pub mod metrics;
pub mod paths;
pub mod server;
pub mod sock_diag;
pub mod state;
pub mod tunnel;
pub mod users;
pub mod volumes;

use std::{num::NonZero, process::ExitCode, sync::Arc, thread};

use args::Args;
use serde_json::json;
use state::AgentState;

/// The version of the envd protocol whose every feature we have.
pub const VERSION: &str = "0.6.7";

/// More workers than this gain nothing in a guest of one or two processors.
const MAX_WORKERS: usize = 2;
/// Threads for calls that block (files, spawning). Work beyond that waits its turn.
const MAX_BLOCKING: usize = 24;

/// Runs the agent until it is killed. `words` are the flags after `agent`.
pub fn main(words: impl Iterator<Item = String>) -> ExitCode {
    std::panic::set_hook(Box::new(log::panicked));
    let args = match Args::parse(words) {
        Ok(args) => args,
        Err(message) => {
            log::error("cannot start the agent", json!({"error": message}));
            return ExitCode::from(2);
        }
    };
    let settings = state::load(&args.state_file).unwrap_or_else(|error| {
        log::error(
            "cannot read the state file, starting without it",
            json!({"path": args.state_file, "error": error.to_string()}),
        );
        state::Settings::default()
    });
    let host = host::protect(&args);
    let workers = thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(MAX_WORKERS);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .max_blocking_threads(MAX_BLOCKING)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            log::error(
                "cannot start the runtime",
                json!({"error": error.to_string()}),
            );
            return ExitCode::FAILURE;
        }
    };
    let state = Arc::new(AgentState::new(args, host, settings));
    match runtime.block_on(server::run(state)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::error("the server ended", json!({"error": format!("{error:#}")}));
            ExitCode::FAILURE
        }
    }
}
