//! Unary calls: one message in the body, one in the answer, errors as HTTP statuses.

use std::{future::Future, sync::Arc};

use axum::{body::Body, extract::Request, response::Response};
use http::{header::CONTENT_TYPE, HeaderValue};

use super::{
    body,
    codec::{Codec, Message},
    Code, Context, RpcError, RpcResult,
};
use crate::agent::state::AgentState;

/// Runs one unary call.
pub async fn serve<Req, Resp, F, Fut>(
    state: Arc<AgentState>,
    request: Request,
    handler: F,
) -> Response
where
    Req: Message,
    Resp: Message,
    F: FnOnce(Context, Req) -> Fut + Send,
    Fut: Future<Output = RpcResult<Resp>> + Send,
{
    let (parts, raw) = request.into_parts();
    let Some(codec) = Codec::of_unary(body::content_type(&parts.headers)) else {
        return body::unsupported_media_type(&parts.headers);
    };
    let answer = async {
        body::refuse_content_encoding(&parts.headers)?;
        let context = Context::from_headers(state, &parts.headers)?;
        let deadline = context.deadline;
        let call = async {
            let message = codec.decode::<Req>(&body::collect(raw).await?)?;
            let answer = handler(context, message).await?;
            let mut bytes = Vec::new();
            codec.encode(&answer, &mut bytes)?;
            Ok(bytes)
        };
        match deadline {
            None => call.await,
            Some(deadline) => tokio::time::timeout_at(deadline.into(), call)
                .await
                .unwrap_or_else(|_| Err(deadline_exceeded())),
        }
    };
    match answer.await {
        Ok(bytes) => {
            let mut response = Response::new(Body::from(bytes));
            response.headers_mut().insert(
                CONTENT_TYPE,
                HeaderValue::from_static(codec.unary_content_type()),
            );
            response
        }
        Err(error) => body::error_response(&error),
    }
}

/// What a call ends with when its `Connect-Timeout-Ms` is over.
pub fn deadline_exceeded() -> RpcError {
    RpcError::new(
        Code::DeadlineExceeded,
        "the time that the client allowed is over",
    )
}
