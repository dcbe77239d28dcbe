//! A daemon in a directory of its own, and clients for it.
#![allow(dead_code)]

pub mod nbd;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::{json, Value};

pub const BINARY: &str = env!("CARGO_BIN_EXE_aenv-blockd");

/// Directories of one test.
pub struct Place {
    pub root: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("disks")).unwrap();
        std::fs::create_dir(root.path().join("sandbox")).unwrap();
        Self { root }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub fn start(&self) -> Daemon {
        self.start_with(&[]).expect("the daemon is ready")
    }

    /// Start a daemon; `None` when it ended before it was ready.
    pub fn start_with(&self, environment: &[(&str, &str)]) -> Option<Daemon> {
        let mut command = Command::new(BINARY);
        command
            .arg("serve")
            .arg("--state")
            .arg(self.path("state"))
            .arg("--socket")
            .arg(self.path("control.sock"))
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut lines = String::new();
        loop {
            let before = lines.len();
            if log.read_line(&mut lines).unwrap() == 0 {
                child.wait().unwrap();
                eprint!("{lines}");
                return None;
            }
            if lines[before..].contains("INFO ready") {
                break;
            }
        }
        // The log is read on, so that it says more when a test fails.
        let reader = std::thread::spawn(move || {
            let mut rest = String::new();
            let _ = log.read_to_string(&mut rest);
            eprint!("{rest}");
        });
        Some(Daemon {
            child,
            socket: self.path("control.sock"),
            _reader: reader,
        })
    }

    /// Parameters that open a device with an upper.
    pub fn device(&self, name: &str, lowers: &[&str], size: u64) -> Value {
        let lowers: Vec<_> = lowers.iter().map(|layer| self.text(layer)).collect();
        json!({
            "device": name,
            "lowers": lowers,
            "upper": {"directory": self.text(&format!("disks/{name}")), "virtual_size": size},
        })
    }

    /// Open a device with an upper and export it; the path of its socket.
    pub fn open(&self, control: &mut Control, name: &str, lowers: &[&str], size: u64) -> PathBuf {
        control
            .call("open", self.device(name, lowers, size))
            .unwrap();
        self.export(control, name)
    }

    pub fn export(&self, control: &mut Control, name: &str) -> PathBuf {
        let path = self.path(&format!("sandbox/{name}.sock"));
        let params = json!({"device": name, "kind": "nbd", "path": path});
        control.call("export", params).unwrap();
        path
    }
}

/// A running daemon; killed when dropped.
pub struct Daemon {
    child: Child,
    socket: PathBuf,
    _reader: std::thread::JoinHandle<()>,
}

impl Daemon {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn control(&self) -> Control {
        Control::connect(&self.socket)
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// A number of the process from /proc, for example `VmRSS` in KiB.
    pub fn status(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A control connection.
pub struct Control {
    pub reader: BufReader<UnixStream>,
    next: u64,
}

impl Control {
    pub fn connect(path: &Path) -> Self {
        let mut control = Self {
            reader: BufReader::new(UnixStream::connect(path).unwrap()),
            next: 1,
        };
        let greeting = control.line().unwrap();
        assert_eq!(greeting["blockd"]["protocol"], 1);
        control
    }

    /// The next line; `None` at the end.
    pub fn line(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(serde_json::from_str(&line).unwrap()),
        }
    }

    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.reader.get_mut().write_all(bytes)
    }

    /// The result, or the code of the error. A connection that ends is the code `gone`.
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value, String> {
        let id = self.next;
        self.next += 1;
        let line = format!(
            "{}\n",
            json!({"id": id, "method": method, "params": params})
        );
        if self.send(line.as_bytes()).is_err() {
            return Err("gone".into());
        }
        let answer = self.line().ok_or("gone")?;
        assert_eq!(answer["id"], id, "{answer}");
        match answer.get("error") {
            None => Ok(answer["result"].clone()),
            Some(error) => {
                assert!(!error["message"].as_str().unwrap().is_empty());
                eprintln!("{method}: {error}");
                Err(error["code"].as_str().unwrap().to_owned())
            }
        }
    }
}

/// Small, seeded, and good enough for tests.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }
}
