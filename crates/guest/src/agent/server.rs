//! Assembles all routes and serves them, HTTP/1.1 and cleartext HTTP/2 on one port.

use std::{
    io, net::SocketAddr, os::fd::AsRawFd, panic::AssertUnwindSafe, sync::Arc, time::Duration,
};

use anyhow::Context as _;
use axum::{
    extract::{Request, State},
    middleware,
    response::{IntoResponse, Response},
    routing::{get, post},
    Router,
};
use futures_util::FutureExt;
use http::{
    header::{CACHE_CONTROL, CONTENT_TYPE},
    StatusCode,
};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tower_service::Service as _;

use super::{
    auth::{self, Peer},
    cors, drain,
    error::HttpError,
    init, log, metrics,
    state::AgentState,
    tunnel,
};
use crate::rpc::{Code, RpcError};

/// How much unsent data the kernel takes for one connection. Small, so that what a client does not read stays where
/// the flow control of the handlers sees it.
const UNSENT_LIMIT: libc::c_int = 128 << 10;
/// What hyper may buffer for one HTTP/1 connection, each way. Headers must fit.
const CONNECTION_BUFFER: usize = 64 << 10;
/// A peer that vanished without a word (a host that moved the sandbox) is noticed after idle + count × interval.
const KEEPALIVE_IDLE: libc::c_int = 60;
const KEEPALIVE_INTERVAL: libc::c_int = 15;
const KEEPALIVE_COUNT: libc::c_int = 4;

/// All routes. Rooms add theirs here.
fn routes(state: &Arc<AgentState>) -> Router {
    let private = Router::new()
        .route("/init", post(init::handler))
        .route("/tunnel", get(tunnel::handler))
        .layer(middleware::from_fn_with_state(
            Arc::clone(state),
            auth::require_private_peer,
        ));
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics::handler))
        .route("/envs", get(envs))
        .merge(private)
        .with_state(Arc::clone(state))
        .merge(crate::process::router(Arc::clone(state)))
        .merge(crate::files::router(Arc::clone(state)))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(
            Arc::clone(state),
            auth::require_token,
        ))
        .layer(middleware::from_fn(cors::allow_all))
}

async fn health() -> impl IntoResponse {
    (StatusCode::NO_CONTENT, [(CACHE_CONTROL, "no-store")])
}

/// The variables that every command gets.
async fn envs(State(state): State<Arc<AgentState>>) -> impl IntoResponse {
    let body = json!(state.env()).to_string();
    ([(CONTENT_TYPE, "application/json")], body)
}

/// Connect clients are told in their own words that they called a method which we lack.
async fn not_found(request: Request) -> Response {
    let message = format!(
        "there is nothing at {} {}",
        request.method(),
        request.uri().path()
    );
    if request.headers().contains_key("connect-protocol-version") {
        let mut response = RpcError::new(Code::Unimplemented, message).into_response();
        *response.status_mut() = StatusCode::NOT_FOUND;
        return response;
    }
    HttpError::new(StatusCode::NOT_FOUND, message).into_response()
}

async fn method_not_allowed(request: Request) -> HttpError {
    HttpError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        format!(
            "{} does not answer {}",
            request.uri().path(),
            request.method()
        ),
    )
}

/// Listens, says so, serves until the process is killed.
pub async fn run(state: Arc<AgentState>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(state.args.listen)
        .await
        .with_context(|| format!("cannot listen on {}", state.args.listen))?;
    let address = listener
        .local_addr()
        .context("cannot read the bound address")?;
    log::info(
        "listening",
        json!({"address": address.to_string(), "version": super::VERSION}),
    );
    if let Some(target) = state.args.ready {
        tokio::spawn(announce(target));
    }
    let router = routes(&state);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                tokio::spawn(serve_connection(router.clone(), stream, peer));
            }
            Err(error) => {
                log::warn(
                    "cannot accept a connection",
                    json!({"error": error.to_string()}),
                );
                // Out of descriptors or memory: only time helps, and without a pause the loop would spin.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Tells the host that we listen. Datagrams get lost, so it is said three times.
async fn announce(target: SocketAddr) {
    let local: SocketAddr = if target.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        (std::net::Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let send = async {
        let socket = UdpSocket::bind(local).await?;
        for delay in [0, 100, 200] {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            socket.send_to(b"ready", target).await?;
        }
        io::Result::Ok(())
    };
    if let Err(error) = send.await {
        log::warn(
            "cannot send the ready datagram",
            json!({"target": target.to_string(), "error": error.to_string()}),
        );
    }
}

async fn serve_connection(router: Router, stream: TcpStream, peer: SocketAddr) {
    if let Err(error) = tune(&stream) {
        log::warn(
            "cannot tune a connection",
            json!({"error": error.to_string()}),
        );
    }
    let service = service_fn(move |request: http::Request<Incoming>| {
        let mut router = router.clone();
        async move {
            let (mut request, unread) = drain::lend(request);
            request.extensions_mut().insert(Peer(peer));
            let answer = AssertUnwindSafe(router.call(request)).catch_unwind().await;
            unread.drain().await;
            answer.unwrap_or_else(|_| Ok(panicked()))
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().max_buf_size(CONNECTION_BUFFER);
    builder
        .http2()
        .max_concurrent_streams(2048)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20);
    // An error here is a client that went away or spoke no HTTP; neither is news.
    let _ = builder
        .serve_connection_with_upgrades(TokioIo::new(stream), service)
        .await;
}

fn panicked() -> Response {
    HttpError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "the agent failed on this request",
    )
    .into_response()
}

fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    for (option, value) in [
        (libc::TCP_KEEPIDLE, KEEPALIVE_IDLE),
        (libc::TCP_KEEPINTVL, KEEPALIVE_INTERVAL),
        (libc::TCP_KEEPCNT, KEEPALIVE_COUNT),
        (libc::TCP_NOTSENT_LOWAT, UNSENT_LIMIT),
    ] {
        set_tcp_option(stream, option, value)?;
    }
    Ok(())
}

fn set_tcp_option(stream: &TcpStream, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: these options take an int, and we pass the address and size of one that lives through the call.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
