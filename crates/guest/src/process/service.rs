//! The methods of `process.Process`. Each only translates between messages and [`super::running`].

use std::{io, sync::Arc};

use futures_util::{stream, Stream, StreamExt};
use serde_json::json;

use super::{
    command::Command,
    output::{Event, Subscription},
    pty::Size,
    running::{launch, Process, Wanted},
    signal::SendAnySignalRequest,
    table::{Found, Table},
};
use crate::{
    agent::log,
    proto::process::{
        process_event::{self, KeepAlive, StartEvent},
        process_input::Input,
        stream_input_request, CloseStdinRequest, CloseStdinResponse, ConnectRequest,
        ConnectResponse, ListResponse, ProcessEvent, ProcessInfo, ProcessInput, Pty,
        SendInputRequest, SendInputResponse, SendSignalResponse, StartRequest, StartResponse,
        StreamInputRequest, StreamInputResponse, UpdateRequest, UpdateResponse,
    },
    rpc::{Code, Context, Requests, RpcError, RpcResult},
};

/// `List`: what is alive.
pub fn list(table: &Table) -> ListResponse {
    ListResponse {
        processes: table.list(),
    }
}

/// `Start`: the process lives on when the client goes away, but at most as long as the call's timeout.
pub async fn start(
    table: Arc<Table>,
    context: Context,
    request: StartRequest,
) -> RpcResult<impl Stream<Item = RpcResult<StartResponse>>> {
    // A task of its own: a client that leaves now must not leave a half-started process behind.
    let started = tokio::spawn(start_process(table, context, request)).await;
    let (pid, subscription) = started.map_err(|error| {
        RpcError::new(
            Code::Internal,
            format!("starting the process failed: {error}"),
        )
    })??;
    Ok(events(pid, subscription)
        .map(|event| event.map(|event| StartResponse { event: Some(event) })))
}

async fn start_process(
    table: Arc<Table>,
    context: Context,
    request: StartRequest,
) -> RpcResult<(u32, Subscription)> {
    let deadline = context.deadline;
    let state = Arc::clone(&context.state);
    let launched = tokio::task::spawn_blocking(move || launch_request(&context, request))
        .await
        .map_err(|error| {
            RpcError::new(
                Code::Internal,
                format!("starting the process failed: {error}"),
            )
        })??;
    let process = Arc::clone(&launched.process);
    let subscription = process.output.subscribe();
    let pid = process.info.pid;
    let key = table.insert(process);
    tokio::spawn(async move {
        let output = Arc::clone(&launched.process.output);
        let end = launched.supervise(&state, deadline).await;
        table.finish(key, end.clone());
        output.finish(end);
    });
    Ok((pid, subscription))
}

fn launch_request(context: &Context, request: StartRequest) -> RpcResult<super::running::Launched> {
    let config = request
        .process
        .ok_or_else(|| RpcError::new(Code::InvalidArgument, "the request names no process"))?;
    let user = context.user()?;
    let state = &context.state;
    let workdir = state.default_workdir();
    let command = Command::new(&config, user, state.env(), workdir.as_deref())?;
    let wanted = match request.pty {
        Some(pty) => Wanted::Terminal(size(pty)?),
        None if request.stdin == Some(false) => Wanted::Nothing,
        None => Wanted::Pipe,
    };
    let info = ProcessInfo {
        config: Some(config),
        pid: 0,
        tag: request.tag,
    };
    let launched = launch(state, &command, wanted, info)?;
    let info = &launched.process.info;
    log::info(
        "process started",
        json!({
            "pid": info.pid,
            "cmd": command.argv[0].to_string_lossy(),
            "user": command.user.name,
            "tag": info.tag,
        }),
    );
    Ok(launched)
}

/// `Connect`: output from now on, and the end, even if it was a short while ago.
pub async fn connect(
    table: Arc<Table>,
    request: ConnectRequest,
) -> RpcResult<impl Stream<Item = RpcResult<ConnectResponse>>> {
    let events = match table.find(request.process)? {
        Found::Running(process) => events(process.info.pid, process.output.subscribe()).boxed(),
        Found::Ended { pid, end } => {
            stream::iter([Ok(started(pid)), Ok(event(process_event::Event::End(end)))]).boxed()
        }
    };
    Ok(events.map(|event| event.map(|event| ConnectResponse { event: Some(event) })))
}

/// `start`, then everything that the subscription gives.
fn events(pid: u32, subscription: Subscription) -> impl Stream<Item = RpcResult<ProcessEvent>> {
    let rest = stream::unfold(subscription, |mut subscription| async move {
        let item = match subscription.next().await? {
            Event::Data(chunk) => Ok(event(process_event::Event::Data(chunk.into()))),
            Event::End(end) => Ok(event(process_event::Event::End(end))),
            Event::CutOff => Err(RpcError::new(
                Code::ResourceExhausted,
                "the reader took no output for too long and has missed some; the process goes on",
            )),
        };
        Some((item, subscription))
    });
    stream::once(async move { Ok(started(pid)) }).chain(rest)
}

fn event(event: process_event::Event) -> ProcessEvent {
    ProcessEvent { event: Some(event) }
}

fn started(pid: u32) -> ProcessEvent {
    event(process_event::Event::Start(StartEvent { pid }))
}

/// What fills idle time on a `Start` stream.
pub fn start_keepalive() -> StartResponse {
    StartResponse {
        event: Some(event(process_event::Event::Keepalive(KeepAlive {}))),
    }
}

/// The same on a `Connect` stream.
pub fn connect_keepalive() -> ConnectResponse {
    ConnectResponse {
        event: Some(event(process_event::Event::Keepalive(KeepAlive {}))),
    }
}

/// `Update`: resizes the terminal; without a size there is nothing to do.
pub async fn update(table: Arc<Table>, request: UpdateRequest) -> RpcResult<UpdateResponse> {
    let process = table.find_running(request.process)?;
    if let Some(size) = request.pty.map(size).transpose()?.flatten() {
        process.resize(size)?;
    }
    Ok(UpdateResponse {})
}

fn size(pty: Pty) -> RpcResult<Option<Size>> {
    pty.size
        .map(|size| {
            Size::new(size.cols, size.rows).ok_or_else(|| {
                RpcError::new(
                    Code::InvalidArgument,
                    format!(
                        "a terminal cannot have {} columns and {} rows",
                        size.cols, size.rows
                    ),
                )
            })
        })
        .transpose()
}

/// `SendInput`: returns when the process's pipe or terminal has taken all of it.
pub async fn send_input(
    table: Arc<Table>,
    request: SendInputRequest,
) -> RpcResult<SendInputResponse> {
    let process = table.find_running(request.process)?;
    write(&process, request.input).await?;
    Ok(SendInputResponse {})
}

async fn write(process: &Process, input: Option<ProcessInput>) -> RpcResult<()> {
    match input.and_then(|input| input.input) {
        Some(Input::Stdin(bytes)) => process.write_stdin(&bytes).await,
        Some(Input::Pty(bytes)) => process.write_pty(&bytes).await,
        None => Err(RpcError::new(
            Code::Unimplemented,
            "the input is neither stdin nor pty",
        )),
    }
}

/// `StreamInput`: the first message names the process, the others feed it in order.
pub async fn stream_input(
    table: Arc<Table>,
    mut requests: Requests<StreamInputRequest>,
) -> RpcResult<StreamInputResponse> {
    let mut process = None;
    while let Some(request) = requests.next().await? {
        match (request.event, &process) {
            (Some(stream_input_request::Event::Start(start)), None) => {
                process = Some(table.find_running(start.process)?);
            }
            (Some(stream_input_request::Event::Start(_)), Some(_)) => {
                return Err(RpcError::new(
                    Code::InvalidArgument,
                    "the stream has a second start",
                ));
            }
            (Some(stream_input_request::Event::Data(data)), Some(process)) => {
                write(process, data.input).await?;
            }
            (Some(stream_input_request::Event::Data(_)), None) => {
                return Err(RpcError::new(
                    Code::InvalidArgument,
                    "the stream must begin with a start",
                ));
            }
            (Some(stream_input_request::Event::Keepalive(_)), _) => {}
            (None, _) => {
                return Err(RpcError::new(
                    Code::Unimplemented,
                    "the message has no event",
                ))
            }
        }
    }
    Ok(StreamInputResponse {})
}

/// `SendSignal`: SIGKILL takes the children along where there are cgroups, SIGTERM is for the process itself.
pub async fn send_signal(
    table: Arc<Table>,
    request: SendAnySignalRequest,
) -> RpcResult<SendSignalResponse> {
    let process = table.find_running(request.process)?;
    let result = match request.signal {
        libc::SIGKILL => process.kill(),
        libc::SIGTERM => process.terminate(),
        other => {
            return Err(RpcError::new(
                Code::Unimplemented,
                format!("signal {other} is not supported, only SIGKILL and SIGTERM are"),
            ))
        }
    };
    match result {
        Ok(()) => Ok(SendSignalResponse {}),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(RpcError::new(
            Code::NotFound,
            format!("the process with pid {} is over", process.info.pid),
        )),
        Err(error) => Err(RpcError::new(
            Code::Internal,
            format!("cannot send the signal: {error}"),
        )),
    }
}

/// `CloseStdin`: the process reads the end of its input after what was sent before.
pub async fn close_stdin(
    table: Arc<Table>,
    request: CloseStdinRequest,
) -> RpcResult<CloseStdinResponse> {
    table.find_running(request.process)?.close_stdin().await?;
    Ok(CloseStdinResponse {})
}
