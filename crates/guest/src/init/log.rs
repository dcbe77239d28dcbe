//! Log lines of init: one JSON object per line on the console, in the agent's form.
//!
//! Must work before anything is mounted and must never fail or panic: init has nobody to report to but the console.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

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
    let elapsed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let line = line(level, message, elapsed.as_secs(), elapsed.subsec_micros());
    // One write per line, so that lines of the kernel and the agent do not end up inside of ours.
    let _ = match CONSOLE.get() {
        Some(mut console) => console.write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}

fn line(level: &str, message: &str, seconds: u64, micros: u32) -> String {
    let message = serde_json::Value::from(message);
    format!(
        "{{\"timestamp\":\"{}\",\"level\":\"{level}\",\"logger\":\"init\",\"message\":{message}}}\n",
        rfc3339(seconds, micros)
    )
}

/// UTC time of a Unix time. The date follows the civil calendar by counting days in eras of 400 years from March.
fn rfc3339(seconds: u64, micros: u32) -> String {
    let (days, of_day) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{micros:06}Z",
        of_day / 3_600,
        of_day % 3_600 / 60,
        of_day % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_follow_the_calendar() {
        assert_eq!(rfc3339(0, 0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(rfc3339(951_782_399, 1), "2000-02-28T23:59:59.000001Z");
        assert_eq!(rfc3339(951_782_400, 0), "2000-02-29T00:00:00.000000Z");
        assert_eq!(
            rfc3339(1_798_761_599, 999_999),
            "2026-12-31T23:59:59.999999Z"
        );
    }

    #[test]
    fn a_line_is_one_json_object_whatever_the_message() {
        let text = line("warn", "quote \" newline \n bell \u{7}", 0, 0);
        assert_eq!(text.matches('\n').count(), 1);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["message"], "quote \" newline \n bell \u{7}");
        assert_eq!(value["level"], "warn");
    }
}
