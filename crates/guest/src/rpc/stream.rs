//! Streaming calls: frames both ways, HTTP status 200 even for errors, and always an end frame.
//!
//! A server stream is ended at the call's deadline and filled with keepalives while it is idle here, so handlers need
//! not care for either. Frames are handed to the connection one by one; hyper writes each as soon as the stream
//! pauses, and asks for no more while the client does not read, which is the back-pressure that handlers see.

use std::{
    future::Future,
    marker::PhantomData,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{body::Body, extract::Request, response::Response};
use bytes::{Bytes, BytesMut};
use futures_util::{stream, Stream, StreamExt};
use http::{header::CONTENT_TYPE, HeaderValue};
use tokio::time::{sleep, sleep_until};

use super::{
    body,
    codec::{Codec, Message},
    envelope::{self, Taken},
    unary::deadline_exceeded,
    Code, Context, RpcError, RpcResult,
};
use crate::agent::state::AgentState;

/// The messages of a client stream, in order.
pub struct Requests<T> {
    body: Body,
    buffer: BytesMut,
    codec: Codec,
    message: PhantomData<fn() -> T>,
}

impl<T: Message> Requests<T> {
    fn new(codec: Codec, body: Body) -> Self {
        Self {
            body,
            buffer: BytesMut::new(),
            codec,
            message: PhantomData,
        }
    }

    /// The next message; `None` once the client has closed its half.
    ///
    /// Fails with `invalid_argument` for a frame that is cut short or cannot be read, `canceled` when the client went
    /// away in the middle, `resource_exhausted` for a message that is too large.
    pub async fn next(&mut self) -> RpcResult<Option<T>> {
        loop {
            match envelope::take(&mut self.buffer)? {
                Taken::Message(payload) => return self.codec.decode(&payload).map(Some),
                Taken::End => return Ok(None),
                Taken::Incomplete => match body::next_data(&mut self.body).await? {
                    Some(data) => self.buffer.extend_from_slice(&data),
                    None if self.buffer.is_empty() => return Ok(None),
                    None => {
                        return Err(RpcError::new(
                            Code::InvalidArgument,
                            "the request stream ends inside a frame",
                        ))
                    }
                },
            }
        }
    }

    /// The one message that a server-streaming request has.
    async fn single(&mut self) -> RpcResult<T> {
        let message = self
            .next()
            .await?
            .ok_or_else(|| RpcError::new(Code::InvalidArgument, "the request has no message"))?;
        if self.next().await?.is_some() {
            return Err(RpcError::new(
                Code::InvalidArgument,
                "the request has more than one message",
            ));
        }
        Ok(message)
    }
}

/// Runs one server-streaming call.
pub async fn serve_server<Req, Resp, F, Fut, S>(
    state: Arc<AgentState>,
    request: Request,
    keepalive: fn() -> Resp,
    handler: F,
) -> Response
where
    Req: Message,
    Resp: Message,
    F: FnOnce(Context, Req) -> Fut + Send,
    Fut: Future<Output = RpcResult<S>> + Send,
    S: Stream<Item = RpcResult<Resp>> + Send + 'static,
{
    let (parts, raw) = request.into_parts();
    let Some(codec) = Codec::of_stream(body::content_type(&parts.headers)) else {
        return body::unsupported_media_type(&parts.headers);
    };
    let opened = async {
        body::refuse_encoding(&parts.headers, "connect-content-encoding")?;
        let context = Context::from_headers(state, &parts.headers)?;
        let (deadline, interval) = (context.deadline, context.keepalive);
        let open = async {
            let message = Requests::new(codec, raw).single().await?;
            handler(context, message).await
        };
        let messages = bounded(deadline, open).await?;
        let frames = messages
            .map(move |message| message.and_then(|message| envelope::message(codec, &message)));
        let keepalive = envelope::message(codec, &keepalive())?;
        Ok(frames_with_keepalive(
            frames.boxed(),
            keepalive,
            interval,
            deadline,
        ))
    };
    let body = match opened.await {
        Ok(frames) => Body::from_stream(frames),
        Err(error) => Body::from(envelope::end(Some(&error))),
    };
    stream_response(codec, body)
}

/// Runs one client-streaming call.
pub async fn serve_client<Req, Resp, F, Fut>(
    state: Arc<AgentState>,
    request: Request,
    handler: F,
) -> Response
where
    Req: Message,
    Resp: Message,
    F: FnOnce(Context, Requests<Req>) -> Fut + Send,
    Fut: Future<Output = RpcResult<Resp>> + Send,
{
    let (parts, raw) = request.into_parts();
    let Some(codec) = Codec::of_stream(body::content_type(&parts.headers)) else {
        return body::unsupported_media_type(&parts.headers);
    };
    let answer = async {
        body::refuse_encoding(&parts.headers, "connect-content-encoding")?;
        let context = Context::from_headers(state, &parts.headers)?;
        let deadline = context.deadline;
        let answer = bounded(deadline, handler(context, Requests::new(codec, raw))).await?;
        envelope::message(codec, &answer)
    };
    let mut frames = BytesMut::new();
    match answer.await {
        Ok(frame) => {
            frames.extend_from_slice(&frame);
            frames.extend_from_slice(&envelope::end(None));
        }
        Err(error) => frames.extend_from_slice(&envelope::end(Some(&error))),
    }
    stream_response(codec, Body::from(frames.freeze()))
}

async fn bounded<T>(
    deadline: Option<Instant>,
    work: impl Future<Output = RpcResult<T>>,
) -> RpcResult<T> {
    match deadline {
        None => work.await,
        Some(deadline) => tokio::time::timeout_at(deadline.into(), work)
            .await
            .unwrap_or_else(|_| Err(deadline_exceeded())),
    }
}

fn stream_response(codec: Codec, body: Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static(codec.stream_content_type()),
    );
    response
}

struct Outgoing {
    frames: Pin<Box<dyn Stream<Item = RpcResult<Bytes>> + Send>>,
    keepalive: Bytes,
    interval: Duration,
    deadline: Option<Instant>,
    ended: bool,
}

/// `frames`, a keepalive after every idle interval, and one end frame, at the latest at the deadline.
fn frames_with_keepalive(
    frames: Pin<Box<dyn Stream<Item = RpcResult<Bytes>> + Send>>,
    keepalive: Bytes,
    interval: Duration,
    deadline: Option<Instant>,
) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> + Send {
    let outgoing = Outgoing {
        frames,
        keepalive,
        interval,
        deadline,
        ended: false,
    };
    stream::unfold(outgoing, |mut outgoing| async move {
        if outgoing.ended {
            return None;
        }
        let frame = outgoing.next().await;
        Some((Ok(frame), outgoing))
    })
}

impl Outgoing {
    async fn next(&mut self) -> Bytes {
        // An endless supply of messages must not hide the deadline, hence the look at the clock before the messages.
        if self
            .deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
        {
            return self.end(Some(&deadline_exceeded()));
        }
        let deadline = self.deadline;
        let expired = async {
            match deadline {
                Some(deadline) => sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            frame = self.frames.next() => match frame {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => self.end(Some(&error)),
                None => self.end(None),
            },
            () = expired => self.end(Some(&deadline_exceeded())),
            () = sleep(self.interval) => self.keepalive.clone(),
        }
    }

    fn end(&mut self, error: Option<&RpcError>) -> Bytes {
        self.ended = true;
        // Whatever the messages hold (a subscription, a watch) is given back now, not when the client has read all.
        self.frames = stream::empty().boxed();
        envelope::end(error)
    }
}
