//! Says what is wrong with a JSON message in words for those who sent it, not for those who wrote its reader.

use serde_json::error::Category;

use super::{Code, RpcError};

/// Beginnings of serde's texts about wrong data that people understand.
const READABLE: [&str; 2] = ["unknown variant", "duplicate field"];

/// The `invalid_argument` for `message`, which could not be read because of `error`.
pub fn explain(message: &[u8], error: &serde_json::Error) -> RpcError {
    let (line, column) = (error.line(), error.column());
    let full = error.to_string();
    let position = format!(" at line {line} column {column}");
    let text = full.strip_suffix(&position).unwrap_or(&full);
    let problem = match error.classify() {
        Category::Data => {
            let subject = match last_key(before(message, line, column)) {
                Some(key) => format!("the value of '{key}'"),
                None => "a value".to_owned(),
            };
            if READABLE.iter().any(|known| text.starts_with(known)) {
                format!("{subject}: {text}")
            } else {
                format!("{subject} has the wrong type or is out of range")
            }
        }
        Category::Syntax | Category::Eof | Category::Io => format!("it is no valid JSON: {text}"),
    };
    RpcError::new(
        Code::InvalidArgument,
        format!("cannot read the request message: {problem} (line {line}, column {column})"),
    )
}

/// What comes before a position; lines count from 1, columns in bytes.
fn before(message: &[u8], line: usize, column: usize) -> &[u8] {
    let start: usize = message
        .split_inclusive(|byte| *byte == b'\n')
        .take(line.saturating_sub(1))
        .map(<[u8]>::len)
        .sum();
    &message[..message.len().min(start + column)]
}

/// The last complete string that a colon follows.
fn last_key(text: &[u8]) -> Option<String> {
    let (mut key, mut last) = (None, None);
    let mut rest = text.iter().enumerate();
    while let Some((start, byte)) = rest.next() {
        match byte {
            b'"' => {
                let mut escaped = false;
                let end = rest.find(|(_, byte)| {
                    let ends = **byte == b'"' && !escaped;
                    escaped = **byte == b'\\' && !escaped;
                    ends
                });
                let Some((end, _)) = end else {
                    break;
                };
                last = text.get(start..=end);
            }
            b':' => key = last,
            _ => {}
        }
    }
    serde_json::from_slice(key?).ok()
}

#[cfg(test)]
mod tests {
    use super::super::codec::Codec;
    use crate::proto::{
        filesystem::ListDirRequest,
        process::{SendSignalRequest, StartRequest, UpdateRequest},
    };
    use crate::rpc::codec::Message;

    fn message<T: Message>(json: &str) -> String {
        let error = Codec::Json.decode::<T>(json.as_bytes()).err().unwrap();
        assert_eq!(error.code, super::Code::InvalidArgument);
        error
            .message
            .strip_prefix("cannot read the request message: ")
            .unwrap()
            .to_owned()
    }

    #[test]
    fn wrong_values_are_named_in_plain_words() {
        for (got, expected) in [
            (
                message::<ListDirRequest>(r#"{"path":"/","depth":-1}"#),
                "the value of 'depth' has the wrong type or is out of range (line 1, column",
            ),
            (
                message::<UpdateRequest>("{\"process\": {\n \"pid\": -1}}"),
                "the value of 'pid' has the wrong type or is out of range (line 2, column",
            ),
            (
                message::<UpdateRequest>(
                    r#"{"process":{"pid":1},"pty":{"size":{"cols":-1,"rows":4}}}"#,
                ),
                "the value of 'cols' has the wrong",
            ),
            (
                message::<StartRequest>(r#"{"process":{"args":["a: \"b\":",7]}}"#),
                "the value of 'args' has the wrong",
            ),
            (message::<StartRequest>("[1]"), "a value has the wrong type"),
            (
                message::<SendSignalRequest>(r#"{"signal":"SIGNAL_NONE"}"#),
                "the value of 'signal': unknown variant `SIGNAL_NONE`, expected",
            ),
            (
                message::<StartRequest>(r#"{"process":"#),
                "it is no valid JSON: EOF while parsing a value (line 1, column 11)",
            ),
        ] {
            assert!(got.starts_with(expected), "{got}");
            for internal in ["untagged", "enum", "serde", "struct", " at line "] {
                assert!(!got.contains(internal), "{got}");
            }
        }
    }
}
