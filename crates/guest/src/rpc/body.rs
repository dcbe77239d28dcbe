//! Bodies and responses that unary and streaming calls share.

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::{Bytes, BytesMut};
use http::{
    header::{CONTENT_ENCODING, CONTENT_TYPE},
    HeaderMap, StatusCode,
};
use http_body_util::BodyExt;

use super::{envelope, Code, RpcError, RpcResult};

/// Reads a whole request body of at most [`envelope::MAX_MESSAGE`] bytes (and a frame header).
pub async fn collect(mut body: Body) -> RpcResult<Bytes> {
    let mut buffer = BytesMut::new();
    while let Some(data) = next_data(&mut body).await? {
        if buffer.len() + data.len() > envelope::MAX_MESSAGE + 5 {
            return Err(envelope::too_large(buffer.len() + data.len()));
        }
        buffer.extend_from_slice(&data);
    }
    Ok(buffer.freeze())
}

/// The next piece of a request body, `None` at its end. Fails with `canceled` when the client went away.
pub async fn next_data(body: &mut Body) -> RpcResult<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            RpcError::new(
                Code::Canceled,
                format!("the request body broke off: {error}"),
            )
        })?;
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// Refuses a compressed body; we offer no compression, so no client should send one.
pub fn refuse_encoding(headers: &HeaderMap, name: &str) -> RpcResult<()> {
    match headers.get(name) {
        None => Ok(()),
        Some(value) if value.as_bytes().eq_ignore_ascii_case(b"identity") || value.is_empty() => {
            Ok(())
        }
        Some(value) => Err(RpcError::new(
            Code::Unimplemented,
            format!("the encoding {value:?} is not supported, only identity is"),
        )),
    }
}

/// The same for the header that unary calls use.
pub fn refuse_content_encoding(headers: &HeaderMap) -> RpcResult<()> {
    refuse_encoding(headers, CONTENT_ENCODING.as_str())
}

/// The `Content-Type` of a request, empty when there is none.
pub fn content_type(headers: &HeaderMap) -> &str {
    headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

/// The answer to a content type that no codec reads.
pub fn unsupported_media_type(headers: &HeaderMap) -> Response {
    let message = format!(
        "the content type {:?} is not supported",
        content_type(headers)
    );
    let mut response = error_response(&RpcError::new(Code::InvalidArgument, message));
    *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    response
}

/// An error as the body of a unary answer.
pub fn error_response(error: &RpcError) -> Response {
    let status =
        StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let body =
        serde_json::json!({"code": error.code.as_str(), "message": error.message}).to_string();
    (status, [(CONTENT_TYPE, "application/json")], body).into_response()
}

impl IntoResponse for RpcError {
    fn into_response(self) -> Response {
        error_response(&self)
    }
}
