//! Starts the real agent on a free port and speaks its wire protocol. Holds no expectations of its own.
//!
//! The tests run as root on any Linux machine; they change nothing outside their temporary directories.

#![allow(dead_code)]

#[path = "../../src/proto.rs"]
pub mod proto;

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use base64::{engine::general_purpose::STANDARD, Engine};
use bytes::{Buf, Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::{combinators::UnsyncBoxBody, BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{json, Value};
use tempfile::TempDir;
use tokio::net::TcpStream;

pub const CAP_SYS_ADMIN: u8 = 21;
pub const CAP_SYS_TIME: u8 = 25;

pub type Body = UnsyncBoxBody<Bytes, std::convert::Infallible>;

/// A running agent; dropping it kills it.
pub struct Agent {
    child: Child,
    pub address: SocketAddr,
    pub dir: TempDir,
}

impl Agent {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    pub fn start_with(extra: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), extra)
    }

    /// Starts an agent whose state, facts and `/etc` are in `dir`, with a host name of its own. It cannot set the clock.
    pub fn start_in(dir: TempDir, extra: &[&str]) -> Self {
        Self::start_without(&[], dir, extra)
    }

    /// Like `start_in`, without the named capabilities (numbers of capabilities(7)).
    pub fn start_without(capabilities: &[u8], dir: TempDir, extra: &[&str]) -> Self {
        let path = |name: &str| dir.path().join(name).into_os_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-guest"));
        command
            .args(["agent", "--listen", "127.0.0.1:0", "--private-peer", "any"])
            .arg("--state-file")
            .arg(path("state.json"))
            .arg("--run-dir")
            .arg(path("run"))
            .arg("--etc-dir")
            .arg(path("etc"))
            .arg("--generation-file")
            .arg(path("generation"))
            .args(extra)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        std::fs::create_dir_all(path("etc")).unwrap();
        let mut dropped = capabilities.to_vec();
        dropped.push(CAP_SYS_TIME);
        // SAFETY: system calls without memory of ours.
        unsafe {
            command.pre_exec(move || {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUTS)?;
                for capability in &dropped {
                    let number = libc::c_ulong::from(*capability);
                    if libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) == -1 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let address = loop {
            let mut line = String::new();
            assert_ne!(
                log.read_line(&mut line).unwrap(),
                0,
                "the agent ended at its start"
            );
            let entry: Value = serde_json::from_str(&line).unwrap();
            if entry["message"] == "listening" {
                break entry["address"].as_str().unwrap().parse().unwrap();
            }
        };
        // Somebody must read the rest; it shows up in the output of a failed test.
        std::thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                println!("agent: {line}");
            }
        });
        Self {
            child,
            address,
            dir,
        }
    }

    /// Kills the agent and gives back its directory.
    pub fn kill(mut self) -> TempDir {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The most memory that the agent ever had, in bytes.
    pub fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmHWM"))
            .unwrap();
        line.split_whitespace()
            .nth(1)
            .unwrap()
            .parse::<u64>()
            .unwrap()
            << 10
    }

    pub fn path(&self, name: &str) -> std::path::PathBuf {
        Path::new(self.dir.path()).join(name)
    }

    /// Sends one request on a connection of its own.
    pub async fn send(&self, request: Request<Body>) -> Response<Incoming> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection.with_upgrades());
        sender.send_request(request).await.unwrap()
    }

    /// Sends a plain request and reads the whole answer.
    pub async fn http(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> (u16, http::HeaderMap, Bytes) {
        let response = self
            .send(request(method, path, headers, body.to_owned()))
            .await;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (parts.status.as_u16(), parts.headers, body)
    }

    /// A unary JSON call: the status and the answer.
    pub async fn unary(&self, method: &str, message: Value) -> (u16, Value) {
        let headers = [
            ("content-type", "application/json"),
            ("connect-protocol-version", "1"),
        ];
        let path = format!("/process.Process/{method}");
        let (status, _, body) = self
            .http("POST", &path, &headers, &message.to_string())
            .await;
        (status, serde_json::from_slice(&body).unwrap())
    }

    /// A streaming JSON call with one request message.
    pub async fn stream(&self, method: &str, message: Value, headers: &[(&str, &str)]) -> Call {
        let mut all = vec![
            ("content-type", "application/connect+json"),
            ("connect-protocol-version", "1"),
        ];
        all.extend_from_slice(headers);
        let path = format!("/process.Process/{method}");
        let response = self
            .send(request(
                "POST",
                &path,
                &all,
                frame(message.to_string().as_bytes()),
            ))
            .await;
        Call::new(response)
    }

    pub async fn start_process(&self, message: Value, headers: &[(&str, &str)]) -> Call {
        self.stream("Start", message, headers).await
    }

    /// Runs a shell command to its end.
    pub async fn sh(&self, script: &str) -> Outcome {
        self.start_process(shell(script), &[]).await.finish().await
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn shell(script: &str) -> Value {
    json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false})
}

pub fn basic(user: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:")))
}

pub fn request(
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Request<Body> {
    let mut builder = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "agent");
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(Full::new(body.into()).boxed_unsync()).unwrap()
}

pub fn frame(payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0];
    frame.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// A server stream that is being read.
pub struct Call {
    pub response: http::response::Parts,
    body: Incoming,
    buffer: BytesMut,
}

/// What a finished process left.
#[derive(Debug, Default)]
pub struct Outcome {
    pub pid: u64,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub pty: Vec<u8>,
    pub keepalives: usize,
    pub end: Option<Value>,
    /// The payload of the end frame.
    pub trailer: Value,
}

impl Outcome {
    pub fn exit_code(&self) -> i64 {
        self.end.as_ref().expect("no end")["exitCode"]
            .as_i64()
            .unwrap_or(0)
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }

    pub fn error_code(&self) -> &str {
        self.trailer["error"]["code"].as_str().unwrap_or_default()
    }
}

impl Call {
    pub fn new(response: Response<Incoming>) -> Self {
        let (response, body) = response.into_parts();
        Self {
            response,
            body,
            buffer: BytesMut::new(),
        }
    }

    /// The next frame: its flags and payload.
    pub async fn frame(&mut self) -> Option<(u8, Bytes)> {
        loop {
            if self.buffer.len() >= 5 {
                let len = u32::from_be_bytes(self.buffer[1..5].try_into().unwrap()) as usize;
                if self.buffer.len() >= 5 + len {
                    let flags = self.buffer[0];
                    self.buffer.advance(5);
                    return Some((flags, self.buffer.split_to(len).freeze()));
                }
            }
            let data = self.body.frame().await?.unwrap().into_data().unwrap();
            self.buffer.extend_from_slice(&data);
        }
    }

    /// The next event of a process stream; `Err` with the end frame's payload.
    pub async fn event(&mut self) -> Result<Value, Value> {
        let (flags, payload) = self
            .frame()
            .await
            .expect("the stream broke off without an end frame");
        let value: Value = serde_json::from_slice(&payload).unwrap();
        match flags {
            0 => Ok(value["event"].clone()),
            2 => Err(value),
            other => panic!("unexpected flags {other}"),
        }
    }

    /// Reads the `start` event.
    pub async fn pid(&mut self) -> u64 {
        self.event().await.unwrap()["start"]["pid"]
            .as_u64()
            .expect("no start event")
    }

    /// Reads output of `stream` until `wanted` has come by.
    pub async fn expect(&mut self, stream: &str, wanted: &str) {
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(wanted) {
            let event = self
                .event()
                .await
                .unwrap_or_else(|end| panic!("{end} after {:?}", String::from_utf8_lossy(&seen)));
            if let Some(data) = event["data"][stream].as_str() {
                seen.extend(STANDARD.decode(data).unwrap());
            }
        }
    }

    /// Reads everything.
    pub async fn finish(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        loop {
            let event = match self.event().await {
                Ok(event) => event,
                Err(trailer) => {
                    outcome.trailer = trailer;
                    assert!(
                        self.frame().await.is_none(),
                        "something follows the end frame"
                    );
                    return outcome;
                }
            };
            assert!(outcome.end.is_none(), "{event} follows the end event");
            if let Some(pid) = event["start"]["pid"].as_u64() {
                outcome.pid = pid;
            }
            for (name, output) in [
                ("stdout", &mut outcome.stdout),
                ("stderr", &mut outcome.stderr),
                ("pty", &mut outcome.pty),
            ] {
                if let Some(data) = event["data"][name].as_str() {
                    output.extend(STANDARD.decode(data).unwrap());
                }
            }
            outcome.keepalives += usize::from(event.get("keepalive").is_some());
            if let Some(end) = event.get("end") {
                outcome.end = Some(end.clone());
            }
        }
    }
}
