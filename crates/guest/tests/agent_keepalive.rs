//! One HTTP/1.1 connection outlives errors: whatever the agent refuses, the next request on it is answered.

mod support;

use http_body_util::BodyExt;
use hyper::{body::Incoming, client::conn::http1::SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::{json, Value};
use support::{basic, frame, request, shell, Agent, Body, Call};
use tokio::net::TcpStream;

const JSON: (&str, &str) = ("content-type", "application/json");
const STREAM: (&str, &str) = ("content-type", "application/connect+json");

/// A connection that is never replaced by another one.
struct Connection(SendRequest<Body>);

impl Connection {
    async fn to(agent: &Agent) -> Self {
        let stream = TcpStream::connect(agent.address).await.unwrap();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    async fn send(
        &mut self,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<bytes::Bytes>,
    ) -> http::Response<Incoming> {
        self.0
            .ready()
            .await
            .expect("the agent closed the connection");
        let response = self
            .0
            .send_request(request("POST", path, headers, body))
            .await
            .expect("the agent closed the connection");
        assert!(
            !response.headers().contains_key("connection"),
            "{response:?}"
        );
        response
    }

    async fn status(&mut self, path: &str, headers: &[(&str, &str)], body: &str) -> u16 {
        let response = self.send(path, headers, body.to_owned()).await;
        let status = response.status().as_u16();
        response.into_body().collect().await.unwrap();
        status
    }

    async fn start(&mut self, headers: &[(&str, &str)], message: &Value) -> support::Outcome {
        let body = frame(message.to_string().as_bytes());
        let mut all = vec![STREAM];
        all.extend_from_slice(headers);
        Call::new(self.send("/process.Process/Start", &all, body).await)
            .finish()
            .await
    }

    async fn works(&mut self, token: &str) {
        let outcome = self
            .start(&[("x-access-token", token)], &shell("echo fine"))
            .await;
        assert_eq!(outcome.text(), "fine\n");
    }
}

/// Sizes that arrive with the head, behind it, and in more pieces than one.
const SIZES: [usize; 3] = [1, 10 << 10, 60 << 10];

#[tokio::test]
async fn a_start_for_an_unknown_user_leaves_the_connection_open() {
    let agent = Agent::start();
    let mut connection = Connection::to(&agent).await;
    let nobody = basic("no-such-user");
    for size in SIZES {
        let mut message = shell("true");
        message["tag"] = json!("x".repeat(size));
        let outcome = connection
            .start(&[("authorization", &nobody)], &message)
            .await;
        assert_eq!(outcome.error_code(), "unauthenticated");
        connection.works("").await;
    }
}

#[tokio::test]
async fn refused_unary_calls_leave_the_connection_open() {
    let agent = Agent::start();
    agent
        .http("POST", "/init", &[], r#"{"accessToken":"secret"}"#)
        .await;
    let mut connection = Connection::to(&agent).await;
    let token = ("x-access-token", "secret");
    let nobody = basic("no-such-user");
    let list = "/process.Process/List";
    for size in SIZES {
        let body = json!({"unknown": "x".repeat(size)}).to_string();
        assert_eq!(connection.status(list, &[JSON], &body).await, 401);
        connection.works("secret").await;
        let user = [JSON, token, ("authorization", nobody.as_str())];
        assert_eq!(connection.status(list, &user, &body).await, 401);
        connection.works("secret").await;
        for (path, headers, expected) in [
            (list, [("content-type", "text/plain"), token], 415),
            ("/process.Process/None", [JSON, token], 404),
            ("/health", [JSON, token], 405),
        ] {
            let status = connection.status(path, &headers, &body).await;
            assert_eq!(status, expected, "{path}");
            connection.works("secret").await;
        }
        let wrong = "x".repeat(size);
        assert_eq!(connection.status(list, &[JSON, token], &wrong).await, 400);
        connection.works("secret").await;
    }
}

#[tokio::test]
async fn a_large_refused_body_is_not_taken_in() {
    let agent = Agent::start();
    let mut connection = Connection::to(&agent).await;
    let body = "x".repeat(8 << 20);
    let response =
        connection
            .0
            .send_request(request("POST", "/process.Process/None", &[JSON], body));
    // The answer may get lost when the agent closes a connection on which the client still sends.
    if let Ok(response) = response.await {
        assert_eq!(response.status(), 404);
        let _ = response.into_body().collect().await;
    }
    assert!(connection.0.ready().await.is_err());
}
