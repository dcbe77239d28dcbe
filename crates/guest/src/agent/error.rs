//! Errors of the plain HTTP endpoints: `{"code": <status>, "message": …}`. RPC errors are in `rpc::error`.

use axum::response::{IntoResponse, Response};
use http::{header::CONTENT_TYPE, StatusCode};

/// What an HTTP handler fails with.
#[derive(Debug)]
pub struct HttpError {
    pub status: StatusCode,
    pub message: String,
}

impl HttpError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let body =
            serde_json::json!({"code": self.status.as_u16(), "message": self.message}).to_string();
        (self.status, [(CONTENT_TYPE, "application/json")], body).into_response()
    }
}
