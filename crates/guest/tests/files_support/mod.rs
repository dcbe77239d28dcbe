//! Runs the real agent for the tests of the files room, and speaks just enough HTTP and Connect to test it byte by byte.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
};

use serde_json::{json, Value};

/// A running agent with a directory of its own. Killed when dropped.
pub struct Agent {
    child: Child,
    address: SocketAddr,
    pub dir: tempfile::TempDir,
}

impl Agent {
    /// Starts an agent with `settings` in its state file.
    pub fn start(settings: Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state.json");
        std::fs::write(&state, settings.to_string()).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_aenv-guest"))
            .args(["agent", "--listen", "127.0.0.1:0", "--private-peer", "any"])
            .arg("--state-file")
            .arg(&state)
            .arg("--run-dir")
            .arg(dir.path())
            .arg("--etc-dir")
            .arg(dir.path())
            .arg("--generation-file")
            .arg(dir.path().join("generation"))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line = lines
                .next()
                .expect("the agent ended before it listened")
                .unwrap();
            let line: Value = serde_json::from_str(&line).unwrap();
            if line["message"] == "listening" {
                break line["address"].as_str().unwrap().parse().unwrap();
            }
        };
        thread::spawn(move || lines.for_each(drop));
        Self {
            child,
            address,
            dir,
        }
    }

    pub fn plain() -> Self {
        Self::start(json!({"default_user": "root"}))
    }

    /// A path in the agent's directory.
    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The same as text for a query.
    pub fn path(&self, name: &str) -> String {
        self.at(name).to_str().unwrap().to_owned()
    }

    /// The most memory the agent has ever had, in KiB.
    pub fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmHWM:"))
            .unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// The processor time that the agent has used, in clock ticks.
    pub fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // The name, in parentheses, may hold anything; user and system time are the 12th and 13th field after it.
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let times = fields.split_whitespace().skip(11).take(2);
        times.map(|ticks| ticks.parse::<u64>().unwrap()).sum()
    }

    /// Sends a request's head; the body is up to the caller.
    pub fn open(&self, method: &str, target: &str, headers: &[(&str, &str)]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let mut head =
            format!("{method} {target} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    pub fn request(
        &self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Reply {
        let length = body.len().to_string();
        let mut all = headers.to_vec();
        all.push(("Content-Length", &length));
        let mut stream = self.open(method, target, &all);
        stream.write_all(body).unwrap();
        Reply::read(stream)
    }

    pub fn get(&self, target: &str, headers: &[(&str, &str)]) -> Reply {
        self.request("GET", target, headers, b"")
    }

    /// Uploads to a path in the agent's directory.
    pub fn put(&self, name: &str, content: &[u8]) -> Reply {
        self.request(
            "POST",
            &format!("/files?path={}", self.path(name)),
            &[OCTETS],
            content,
        )
    }

    /// Calls a unary method of the file service with JSON; the status and the answer.
    pub fn call(&self, method: &str, message: &Value) -> (u16, Value) {
        self.call_with(method, message, &[])
    }

    pub fn call_with(
        &self,
        method: &str,
        message: &Value,
        headers: &[(&str, &str)],
    ) -> (u16, Value) {
        let mut all = headers.to_vec();
        all.push(("Content-Type", "application/json"));
        let target = format!("/filesystem.Filesystem/{method}");
        let reply = self.request("POST", &target, &all, message.to_string().as_bytes());
        (reply.status, reply.json())
    }

    /// Opens a server stream with JSON.
    pub fn stream(&self, method: &str, message: &Value) -> Frames {
        let payload = message.to_string();
        let mut body = vec![0];
        body.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes());
        body.extend_from_slice(payload.as_bytes());
        let headers = [
            ("Content-Type", "application/connect+json"),
            ("Content-Length", &body.len().to_string()),
        ];
        let mut stream = self.open(
            "POST",
            &format!("/filesystem.Filesystem/{method}"),
            &headers,
        );
        stream.write_all(&body).unwrap();
        let head = Head::read(stream);
        assert_eq!(head.status, 200);
        assert_eq!(
            head.header("content-type"),
            Some("application/connect+json")
        );
        Frames(head.body)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

pub const OCTETS: (&str, &str) = ("Content-Type", "application/octet-stream");

/// An answer whose body has not been read.
pub struct Head {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Body,
}

impl Head {
    pub fn read(stream: TcpStream) -> Self {
        Self::try_read(stream).expect("the connection ended without an answer")
    }

    /// None if the connection ends without an answer.
    pub fn try_read(stream: TcpStream) -> Option<Self> {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        if !reader.read_line(&mut line).is_ok_and(|got| got > 0) {
            return None;
        }
        let status = line.split(' ').nth(1).unwrap().parse().unwrap();
        let mut headers = Vec::new();
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(':') else {
                break;
            };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let chunked = headers
            .iter()
            .any(|(name, value)| name == "transfer-encoding" && value == "chunked");
        let body = Body {
            reader,
            left: if chunked { Some(0) } else { None },
            ended: false,
        };
        Some(Self {
            status,
            headers,
            body,
        })
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// A body, without its chunk marks.
pub struct Body {
    reader: BufReader<TcpStream>,
    /// Of the current chunk; None if there are no chunks.
    left: Option<u64>,
    ended: bool,
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(left) = &mut self.left else {
            return self.reader.read(buffer);
        };
        if self.ended {
            return Ok(0);
        }
        if *left == 0 {
            let mut line = String::new();
            while line.trim().is_empty() {
                line.clear();
                if self.reader.read_line(&mut line)? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            *left = u64::from_str_radix(line.trim(), 16).map_err(io::Error::other)?;
            if *left == 0 {
                self.ended = true;
                return Ok(0);
            }
        }
        let got = (&mut self.reader).take(*left).read(buffer)?;
        *left -= got as u64;
        Ok(got)
    }
}

/// A whole answer.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn read(stream: TcpStream) -> Self {
        let mut head = Head::read(stream);
        let mut body = Vec::new();
        head.body.read_to_end(&mut body).unwrap();
        Self {
            status: head.status,
            headers: head.headers,
            body,
        }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("{:?}", String::from_utf8_lossy(&self.body)))
    }

    /// Asserts that it is an error with `status`, and returns the message.
    pub fn error(&self, status: u16) -> String {
        let body = self.json();
        assert_eq!(
            (self.status, &body["code"]),
            (status, &json!(status)),
            "{body}"
        );
        body["message"].as_str().unwrap().to_owned()
    }
}

/// The messages of a server stream.
pub struct Frames(Body);

impl Frames {
    /// Waits for the next message.
    pub fn next(&mut self) -> Value {
        let mut head = [0; 5];
        self.0.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes(head[1..].try_into().unwrap()) as usize;
        let mut payload = vec![0; length];
        self.0.read_exact(&mut payload).unwrap();
        let payload: Value = serde_json::from_slice(&payload).unwrap();
        if head[0] == 2 {
            return json!({"end": payload});
        }
        payload
    }

    /// Waits for `count` file events; their names and kinds.
    pub fn events(&mut self, count: usize) -> Vec<(String, String)> {
        (0..count)
            .map(|_| event(&self.next()["filesystem"]))
            .collect()
    }
}

/// Name and kind of an event.
pub fn event(event: &Value) -> (String, String) {
    let text = |value: &Value| {
        value
            .as_str()
            .unwrap_or_else(|| panic!("{event}"))
            .to_owned()
    };
    (
        text(&event["name"]),
        text(&event["type"]).replace("EVENT_TYPE_", ""),
    )
}

pub fn is_root() -> bool {
    nix::unistd::getuid().is_root()
}

/// A small file system of its own, unmounted when dropped.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    pub fn mount(at: &Path, options: &str) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("tmpfs"), at, Some("tmpfs"), flags, Some(options)).unwrap();
        Self(at.to_path_buf())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH).unwrap();
    }
}
