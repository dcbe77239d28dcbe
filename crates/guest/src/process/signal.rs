//! `SendSignalRequest` with a signal that may be any number or word. The generated type refuses words and numbers that
//! the enum lacks as malformed, while the contract wants them read and answered with `unimplemented`.

use std::fmt;

use serde::{
    de::{Deserializer, Error, Visitor},
    Deserialize, Serialize,
};

use crate::proto::process::{ProcessSelector, Signal};

/// Same fields and numbers as `process.SendSignalRequest`.
#[derive(Clone, PartialEq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct SendAnySignalRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    /// A word that no signal has is -1.
    #[prost(int32, tag = "2")]
    #[serde(deserialize_with = "any_signal")]
    pub signal: i32,
}

fn any_signal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    deserializer.deserialize_any(AnySignal)
}

struct AnySignal;

impl Visitor<'_> for AnySignal {
    type Value = i32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name or number of a signal")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<i32, E> {
        i32::try_from(value).map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<i32, E> {
        i32::try_from(value).map_err(E::custom)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<i32, E> {
        Ok(Signal::from_str_name(value).map_or(-1, |signal| signal as i32))
    }

    fn visit_unit<E: Error>(self) -> Result<i32, E> {
        Ok(Signal::Unspecified as i32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_read() {
        for (text, signal) in [
            (r#"{"signal":"SIGNAL_SIGKILL"}"#, 9),
            (r#"{"signal":15}"#, 15),
            (r#"{"signal":2}"#, 2),
            (r#"{"signal":"SIGNAL_SIGHUP"}"#, -1),
            (r#"{"signal":null,"other":1}"#, 0),
            ("{}", 0),
        ] {
            let request: SendAnySignalRequest = serde_json::from_str(text).unwrap();
            assert_eq!(request.signal, signal, "{text}");
        }
        assert!(serde_json::from_str::<SendAnySignalRequest>(r#"{"signal":[]}"#).is_err());
    }
}
