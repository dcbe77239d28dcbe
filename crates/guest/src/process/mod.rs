//! Commands in the guest: `process.Process`. Starts and ends processes, carries their input and output; decides nothing
//! about who may ask.

mod clone;
mod command;
mod exit;
mod output;
mod pty;
mod running;
mod service;
mod signal;
mod spawn;
mod stream;
mod table;
mod wait;

use std::{future::ready, sync::Arc};

use axum::Router;

use crate::{
    agent::state::AgentState,
    proto::process::ListRequest,
    rpc::{Context, Service},
};
use table::Table;

/// The service's routes.
pub fn router(state: Arc<AgentState>) -> Router {
    let table = Arc::new(Table::default());
    // Each method's closure owns a handle of the table.
    macro_rules! with_table {
        (|$table:ident, $context:ident, $request:ident| $call:expr) => {{
            let table = Arc::clone(&table);
            move |$context: Context, $request| {
                let $table = Arc::clone(&table);
                $call
            }
        }};
    }
    Service::new("process.Process", state)
        .unary(
            "List",
            with_table!(|table, _context, _request| {
                let _: ListRequest = _request;
                ready(Ok(service::list(&table)))
            }),
        )
        .server_stream(
            "Start",
            service::start_keepalive,
            with_table!(|table, context, request| service::start(table, context, request)),
        )
        .server_stream(
            "Connect",
            service::connect_keepalive,
            with_table!(|table, _context, request| service::connect(table, request)),
        )
        .unary(
            "Update",
            with_table!(|table, _context, request| service::update(table, request)),
        )
        .unary(
            "SendInput",
            with_table!(|table, _context, request| service::send_input(table, request)),
        )
        .client_stream(
            "StreamInput",
            with_table!(|table, _context, requests| service::stream_input(table, requests)),
        )
        .unary(
            "SendSignal",
            with_table!(|table, _context, request| service::send_signal(table, request)),
        )
        .unary(
            "CloseStdin",
            with_table!(|table, _context, request| service::close_stdin(table, request)),
        )
        .into_router()
}
