//! Puts the methods of one service on an axum router.

use std::{future::Future, sync::Arc};

use axum::{
    extract::Request,
    routing::{post, MethodRouter},
    Router,
};
use futures_util::Stream;

use super::{codec::Message, stream, unary, Context, Requests, RpcResult};
use crate::agent::state::AgentState;

/// A service under construction: `/<name>/<method>` for each method.
pub struct Service {
    name: &'static str,
    state: Arc<AgentState>,
    router: Router,
}

impl Service {
    /// A service without methods; `name` with its package, as `process.Process`.
    pub fn new(name: &'static str, state: Arc<AgentState>) -> Self {
        Self {
            name,
            state,
            router: Router::new(),
        }
    }

    /// Adds a method with one request and one response message.
    pub fn unary<Req, Resp, F, Fut>(self, method: &str, handler: F) -> Self
    where
        Req: Message,
        Resp: Message,
        F: Fn(Context, Req) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = RpcResult<Resp>> + Send + 'static,
    {
        let state = Arc::clone(&self.state);
        self.add(
            method,
            post(move |request: Request| {
                unary::serve(Arc::clone(&state), request, handler.clone())
            }),
        )
    }

    /// Adds a method that answers with a stream. `keepalive` makes the message that fills idle time.
    ///
    /// The stream is dropped when the client goes away, so its `Drop` is where a subscription ends. What the handler
    /// does before it returns the stream is cancelled then, too.
    pub fn server_stream<Req, Resp, F, Fut, S>(
        self,
        method: &str,
        keepalive: fn() -> Resp,
        handler: F,
    ) -> Self
    where
        Req: Message,
        Resp: Message,
        F: Fn(Context, Req) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = RpcResult<S>> + Send + 'static,
        S: Stream<Item = RpcResult<Resp>> + Send + 'static,
    {
        let state = Arc::clone(&self.state);
        self.add(
            method,
            post(move |request: Request| {
                stream::serve_server(Arc::clone(&state), request, keepalive, handler.clone())
            }),
        )
    }

    /// Adds a method that takes a stream and answers once.
    pub fn client_stream<Req, Resp, F, Fut>(self, method: &str, handler: F) -> Self
    where
        Req: Message,
        Resp: Message,
        F: Fn(Context, Requests<Req>) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = RpcResult<Resp>> + Send + 'static,
    {
        let state = Arc::clone(&self.state);
        self.add(
            method,
            post(move |request: Request| {
                stream::serve_client(Arc::clone(&state), request, handler.clone())
            }),
        )
    }

    fn add(mut self, method: &str, route: MethodRouter) -> Self {
        self.router = self
            .router
            .route(&format!("/{}/{method}", self.name), route);
        self
    }

    /// The finished service.
    pub fn into_router(self) -> Router {
        self.router
    }
}
