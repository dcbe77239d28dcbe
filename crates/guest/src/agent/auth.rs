//! Who may ask: the sandbox's token for everything public, the host's address for the private paths.

use std::{net::SocketAddr, sync::Arc};

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{Method, StatusCode};

use super::{args::PrivatePeer, error::HttpError, state::AgentState};

/// The header with the sandbox's token.
pub const TOKEN_HEADER: &str = "x-access-token";

/// The address of the client, which the server puts into every request.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// Refuses requests without the token, if the sandbox has one.
///
/// Exempt are `GET /health`, preflights (answered before this), the private paths, which look at the peer instead, and
/// `GET|POST /files`, which also takes signatures and so checks by itself.
pub async fn require_token(
    State(state): State<Arc<AgentState>>,
    request: Request,
    next: Next,
) -> Response {
    let exempt = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/health") => true,
        (&Method::GET | &Method::HEAD | &Method::POST, "/files") => true,
        (_, path) => PRIVATE_PATHS.contains(&path),
    };
    let token = request
        .headers()
        .get(TOKEN_HEADER)
        .map_or(&b""[..], |value| value.as_bytes());
    if exempt || state.token_matches(token) {
        return next.run(request).await;
    }
    HttpError::new(
        StatusCode::UNAUTHORIZED,
        "unauthorized access, please provide a valid access token",
    )
    .into_response()
}

/// Paths for the host only. The ingress must refuse them from outside.
pub const PRIVATE_PATHS: [&str; 2] = ["/init", "/tunnel"];

/// Refuses everybody but the private peer.
pub async fn require_private_peer(
    State(state): State<Arc<AgentState>>,
    request: Request,
    next: Next,
) -> Response {
    let allowed = match state.args.private_peer {
        PrivatePeer::Any => true,
        PrivatePeer::Only(expected) => request
            .extensions()
            .get::<Peer>()
            .is_some_and(|Peer(peer)| peer.ip().to_canonical() == expected.to_canonical()),
    };
    if allowed {
        return next.run(request).await;
    }
    HttpError::new(StatusCode::FORBIDDEN, "this path is private to the host").into_response()
}
