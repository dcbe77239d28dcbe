//! The agent's log: one JSON object per line on stderr. Never blocks: stderr leads to a serial console, and a slow
//! console must not stop the agent, so a line that does not fit is dropped. Callers never pass secrets or output.

use std::{io::Write, os::fd::AsFd, panic::PanicHookInfo, time::SystemTime};

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use serde_json::{json, Map, Value};

use crate::timestamp::rfc3339;

/// A pipe takes this much at once or reports that it is not writable; longer lines are cut.
const MAX_LINE: usize = 4096;

pub fn info(message: &str, fields: Value) {
    write("info", message, fields);
}

pub fn warn(message: &str, fields: Value) {
    write("warn", message, fields);
}

pub fn error(message: &str, fields: Value) {
    write("error", message, fields);
}

/// What a panic leaves in the log, in place of Rust's lines of plain text.
pub fn panicked(info: &PanicHookInfo<'_>) {
    let location = info.location().map(ToString::to_string);
    let payload = info.payload();
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    error(
        "the agent panicked",
        json!({"error": text, "location": location}),
    );
}

fn write(level: &str, message: &str, fields: Value) {
    let line = format_line(SystemTime::now(), level, message, fields);
    let stderr = std::io::stderr();
    let mut poll_fd = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    if !matches!(poll(&mut poll_fd, PollTimeout::ZERO), Ok(1)) {
        return;
    }
    // There is nowhere to report that the log cannot be written.
    let _ = stderr.lock().write_all(line.as_bytes());
}

fn format_line(now: SystemTime, level: &str, message: &str, fields: Value) -> String {
    let mut object = Map::new();
    object.insert("timestamp".into(), rfc3339(now).into());
    object.insert("level".into(), level.into());
    object.insert("logger".into(), "envd".into());
    object.insert("message".into(), message.into());
    let head = object.clone();
    if let Value::Object(fields) = fields {
        object.extend(fields);
    }
    let mut line = Value::Object(object).to_string();
    if line.len() >= MAX_LINE {
        let mut short = head;
        short.insert("cut".into(), json!(true));
        line = Value::Object(short).to_string();
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    #[ignore = "it fails by design, in a process of its own that `a_panic_is_one_line` starts"]
    fn panics() {
        std::panic::set_hook(Box::new(panicked));
        panic!("two\nlines");
    }

    #[test]
    fn a_panic_is_one_line() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "agent::log::tests::panics",
                "--ignored",
                "--nocapture",
            ])
            .output()
            .unwrap();
        let lines = String::from_utf8(child.stderr).unwrap();
        let lines: Vec<Value> = lines
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect();
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0]["error"], "two\nlines");
        assert!(lines[0]["location"].as_str().unwrap().contains("log.rs:"));
    }

    #[test]
    fn a_line_is_one_json_object_and_fits_a_pipe() {
        let line = format_line(UNIX_EPOCH, "info", "a\nb", json!({"pid": 7}));
        assert_eq!(line.matches('\n').count(), 1);
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["message"], "a\nb");
        assert_eq!(value["pid"], 7);
        let long = format_line(UNIX_EPOCH, "info", "m", json!({"x": "y".repeat(MAX_LINE)}));
        assert!(long.len() <= MAX_LINE);
        assert_eq!(serde_json::from_str::<Value>(&long).unwrap()["cut"], true);
    }
}
