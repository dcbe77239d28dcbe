//! Reads what a handler left of a request's body, so that the connection can be used again.
//!
//! hyper closes an HTTP/1 connection whose request was answered before its body was read to the end. A proxy that keeps
//! connections may have sent the next request on it by then, and that request is lost. Only short rests are read: to
//! take in a large upload that is refused would cost more than a new connection.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, extract::Request};
use bytes::Bytes;
use http::{header::EXPECT, Version};
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::time::timeout;

/// The longest rest that is read, in bytes.
const LIMIT: u64 = 64 << 10;
/// How long to wait for a rest of known length, which the client has promised to send.
const PROMISED: Duration = Duration::from_secs(1);
/// How long to wait for the end of a body of unknown length: the client may mean to keep it open.
const OPEN: Duration = Duration::from_millis(100);

/// Where a body lies after its handler has dropped it unread.
#[derive(Default)]
pub struct Unread(Arc<Mutex<Option<Incoming>>>);

/// The request for the routes, and what they will have left of its body.
pub fn lend(request: http::Request<Incoming>) -> (Request, Unread) {
    let unread = Unread::default();
    // A client that waits for "100 Continue" sends nothing unless it is asked to. In HTTP/2 every request is a stream
    // of its own.
    if request.version() >= Version::HTTP_2 || request.headers().contains_key(EXPECT) {
        return (request.map(Body::new), unread);
    }
    let back = Arc::clone(&unread.0);
    let lent = request.map(|body| {
        Body::new(Lent {
            body: Some(body),
            back,
        })
    });
    (lent, unread)
}

impl Unread {
    /// Reads the rest of the body, if there is one and it is short.
    pub async fn drain(self) {
        let body = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut body) = body else {
            return;
        };
        let hint = body.size_hint();
        if hint.lower() > LIMIT {
            return;
        }
        let patience = if hint.exact().is_some() {
            PROMISED
        } else {
            OPEN
        };
        let read = async {
            let mut seen = 0;
            while let Some(Ok(frame)) = body.frame().await {
                seen += frame.data_ref().map_or(0, Bytes::len) as u64;
                if seen > LIMIT {
                    return;
                }
            }
        };
        // What does not come in time is the reason for hyper to close the connection, as it would have done anyway.
        let _ = timeout(patience, read).await;
    }
}

/// A body that goes back when it is dropped before its end.
struct Lent {
    /// None once it has ended.
    body: Option<Incoming>,
    back: Arc<Mutex<Option<Incoming>>>,
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        let polled = Pin::new(body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            *self.back.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        }
    }
}
