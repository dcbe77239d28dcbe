//! Log lines of init: one JSON object per line on the console, in the agent's form.
//!
//! Must work before anything is mounted and must never fail or panic: init has nobody to report to but the console.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    sync::OnceLock,
    time::SystemTime,
};

use crate::timestamp::rfc3339;

static CONSOLE: OnceLock<File> = OnceLock::new();

/// Sends later lines to `/dev/console`, which exists once devtmpfs is mounted. Before, they go to standard error.
pub fn open_console() {
    if let Ok(console) = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_NOCTTY)
        .open("/dev/console")
    {
        let _ = CONSOLE.set(console);
    }
}

/// The console, for the agent's output.
pub fn console() -> Option<&'static File> {
    CONSOLE.get()
}

pub fn info(message: &str) {
    write("info", message);
}

pub fn warn(message: &str) {
    write("warn", message);
}

pub fn error(message: &str) {
    write("error", message);
}

fn write(level: &str, message: &str) {
    let line = line(level, message, SystemTime::now());
    // One write per line, so that lines of the kernel and the agent do not end up inside of ours.
    let _ = match CONSOLE.get() {
        Some(mut console) => console.write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}

fn line(level: &str, message: &str, now: SystemTime) -> String {
    let message = serde_json::Value::from(message);
    format!(
        "{{\"timestamp\":\"{}\",\"level\":\"{level}\",\"logger\":\"init\",\"message\":{message}}}\n",
        rfc3339(now)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_json_object_whatever_the_message() {
        let text = line(
            "warn",
            "quote \" newline \n bell \u{7}",
            SystemTime::UNIX_EPOCH,
        );
        assert_eq!(text.matches('\n').count(), 1);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["message"], "quote \" newline \n bell \u{7}");
        assert_eq!(value["level"], "warn");
    }
}
