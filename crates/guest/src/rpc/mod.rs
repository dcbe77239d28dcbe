//! Connect-RPC over axum. Knows framing, codecs, deadlines, keepalives and error bodies; knows no service.
//!
//! A service is assembled from its methods and becomes a plain [`axum::Router`]:
//!
//! ```ignore
//! rpc::Service::new("filesystem.Filesystem", state)
//!     .unary("Stat", |ctx: rpc::Context, request: StatRequest| async move { Ok(StatResponse { .. }) })
//!     .server_stream("WatchDir", keepalive_message, |ctx: rpc::Context, request: WatchDirRequest| async move {
//!         Ok(some_stream_of_rpc_results)
//!     })
//!     .into_router()
//! ```
//!
//! Every method accepts the JSON and the protobuf codec. Message types only need what `prost` and `pbjson` generate.
//! Source of the protocol: <https://connectrpc.com/docs/protocol>.

mod body;
mod codec;
mod context;
mod envelope;
mod error;
mod json_error;
mod service;
mod stream;
mod unary;

pub use context::Context;
pub use error::{Code, RpcError, RpcResult};
pub use service::Service;
pub use stream::Requests;
