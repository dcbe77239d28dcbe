//! The two codecs of Connect: canonical proto3 JSON and binary protobuf. Knows nothing of HTTP bodies or frames.

use serde::{de::DeserializeOwned, Serialize};

use super::{json_error, Code, RpcError, RpcResult};

/// What a request or response type must be able to do; everything that `build.rs` generates can.
pub trait Message:
    prost::Message + Default + Serialize + DeserializeOwned + Send + 'static
{
}

impl<T: prost::Message + Default + Serialize + DeserializeOwned + Send + 'static> Message for T {}

/// How messages are written in one call. The answer always has the codec of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    Json,
    Proto,
}

impl Codec {
    /// The codec that a unary `Content-Type` names.
    pub fn of_unary(content_type: &str) -> Option<Self> {
        match essence(content_type).as_str() {
            "application/json" => Some(Codec::Json),
            "application/proto" => Some(Codec::Proto),
            _ => None,
        }
    }

    /// The codec that a streaming `Content-Type` names.
    pub fn of_stream(content_type: &str) -> Option<Self> {
        match essence(content_type).as_str() {
            "application/connect+json" => Some(Codec::Json),
            "application/connect+proto" => Some(Codec::Proto),
            _ => None,
        }
    }

    pub fn unary_content_type(self) -> &'static str {
        match self {
            Codec::Json => "application/json",
            Codec::Proto => "application/proto",
        }
    }

    pub fn stream_content_type(self) -> &'static str {
        match self {
            Codec::Json => "application/connect+json",
            Codec::Proto => "application/connect+proto",
        }
    }

    /// Reads one message. Fails with `invalid_argument`. An empty JSON body is the empty message, as in Go's server.
    pub fn decode<T: Message>(self, bytes: &[u8]) -> RpcResult<T> {
        match self {
            Codec::Json if bytes.is_empty() => Ok(T::default()),
            Codec::Json => {
                serde_json::from_slice(bytes).map_err(|error| json_error::explain(bytes, &error))
            }
            Codec::Proto => T::decode(bytes).map_err(|error| {
                RpcError::new(
                    Code::InvalidArgument,
                    format!("cannot read the request message: {error}"),
                )
            }),
        }
    }

    /// Appends one message to `out`.
    pub fn encode<T: Message>(self, message: &T, out: &mut Vec<u8>) -> RpcResult<()> {
        match self {
            Codec::Json => serde_json::to_writer(out, message).map_err(|error| {
                RpcError::new(Code::Internal, format!("cannot write the answer: {error}"))
            }),
            Codec::Proto => {
                // A Vec grows as needed, which is the only way this could fail.
                message.encode(out).map_err(|error| {
                    RpcError::new(Code::Internal, format!("cannot write the answer: {error}"))
                })
            }
        }
    }
}

/// A content type without its parameters, in lower case.
fn essence(content_type: &str) -> String {
    content_type
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase()
}
