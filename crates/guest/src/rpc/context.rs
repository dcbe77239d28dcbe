//! What a handler knows about its call besides the message: the user, the deadline, the keepalive interval.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base64::{engine::general_purpose::STANDARD, Engine};
use http::{header::AUTHORIZATION, HeaderMap};

use super::{Code, RpcError, RpcResult};
use crate::agent::{
    state::AgentState,
    users::{self, User},
};

/// Longest silence of a server stream when the client asks for nothing else.
const DEFAULT_KEEPALIVE: Duration = Duration::from_secs(90);

/// The context of one call.
#[derive(Clone)]
pub struct Context {
    /// What the whole agent shares.
    pub state: Arc<AgentState>,
    /// When `Connect-Timeout-Ms` is over; zero and absent both mean never. The rpc layer ends the call then with
    /// `deadline_exceeded` by itself.
    pub deadline: Option<Instant>,
    /// `Keepalive-Ping-Interval`. The rpc layer sends the keepalives by itself.
    pub keepalive: Duration,
    user_name: Option<String>,
}

impl Context {
    /// Reads the headers of a call.
    ///
    /// Fails with `invalid_argument` for a bad timeout and with `unauthenticated` for a bad `Authorization` or when it
    /// names a user that does not exist.
    pub fn from_headers(state: Arc<AgentState>, headers: &HeaderMap) -> RpcResult<Self> {
        let timeout = timeout(headers)?;
        let user_name = basic_user(headers)?;
        if let Some(name) = &user_name {
            users::lookup(name).map_err(invalid_user)?;
        }
        Ok(Self {
            state,
            deadline: timeout.and_then(|limit| Instant::now().checked_add(limit)),
            keepalive: keepalive(headers),
            user_name,
        })
    }

    /// The user that the call is for: the one it names, else the sandbox's default user.
    ///
    /// Fails with `unauthenticated` ("invalid username: '…'") when there is no such user. Reads `/etc/passwd`.
    pub fn user(&self) -> RpcResult<User> {
        self.state
            .resolve_user(self.user_name.as_deref())
            .map_err(invalid_user)
    }
}

fn invalid_user(error: users::UserError) -> RpcError {
    match error {
        users::UserError::Unknown(name) => {
            RpcError::new(Code::Unauthenticated, format!("invalid username: '{name}'"))
        }
        users::UserError::Unreadable(_) => RpcError::new(Code::Internal, error.to_string()),
    }
}

fn timeout(headers: &HeaderMap) -> RpcResult<Option<Duration>> {
    let Some(value) = headers.get("connect-timeout-ms") else {
        return Ok(None);
    };
    // The protocol allows at most ten digits.
    let millis = value
        .to_str()
        .ok()
        .map(str::trim)
        .filter(|text| {
            !text.is_empty() && text.len() <= 10 && text.bytes().all(|b| b.is_ascii_digit())
        })
        .and_then(|text| text.parse::<u64>().ok())
        .ok_or_else(|| {
            RpcError::new(
                Code::InvalidArgument,
                format!("Connect-Timeout-Ms must be at most ten digits, not {value:?}"),
            )
        })?;
    Ok((millis > 0).then(|| Duration::from_millis(millis)))
}

/// A value that makes no sense is ignored, since the header is only a wish.
fn keepalive(headers: &HeaderMap) -> Duration {
    headers
        .get("keepalive-ping-interval")
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.trim().parse::<u32>().ok())
        .filter(|seconds| *seconds > 0)
        .map_or(DEFAULT_KEEPALIVE, |seconds| {
            Duration::from_secs(seconds.into())
        })
}

/// The user of `Authorization: Basic base64("<user>:")`; other schemes are not ours and are ignored.
fn basic_user(headers: &HeaderMap) -> RpcResult<Option<String>> {
    let Some(value) = headers.get(AUTHORIZATION) else {
        return Ok(None);
    };
    let malformed = || {
        RpcError::new(
            Code::Unauthenticated,
            "cannot read the Authorization header",
        )
    };
    let value = value.to_str().map_err(|_| malformed())?;
    let Some((scheme, encoded)) = value.split_once(' ') else {
        return Ok(None);
    };
    if !scheme.eq_ignore_ascii_case("basic") {
        return Ok(None);
    }
    let decoded = STANDARD.decode(encoded.trim()).map_err(|_| malformed())?;
    let text = String::from_utf8(decoded).map_err(|_| malformed())?;
    let name = text.split_once(':').map_or(text.as_str(), |(name, _)| name);
    Ok((!name.is_empty()).then(|| name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut map = HeaderMap::new();
        map.insert(name, value.parse().unwrap());
        map
    }

    #[test]
    fn zero_and_absent_timeouts_are_no_limit() {
        assert_eq!(timeout(&HeaderMap::new()).unwrap(), None);
        assert_eq!(timeout(&headers("connect-timeout-ms", "0")).unwrap(), None);
        assert_eq!(
            timeout(&headers("connect-timeout-ms", "1500")).unwrap(),
            Some(Duration::from_millis(1500))
        );
    }

    #[test]
    fn bad_timeouts_are_refused() {
        for bad in ["-1", "1.5", "x", "", "12345678901", "+5"] {
            let error = timeout(&headers("connect-timeout-ms", bad)).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{bad:?}");
        }
    }

    #[test]
    fn basic_user_has_an_empty_password() {
        let value = format!("Basic {}", STANDARD.encode("root:"));
        assert_eq!(
            basic_user(&headers("authorization", &value))
                .unwrap()
                .as_deref(),
            Some("root")
        );
        assert_eq!(
            basic_user(&headers("authorization", "Bearer x")).unwrap(),
            None
        );
        let empty = format!("basic {}", STANDARD.encode(":"));
        assert_eq!(basic_user(&headers("authorization", &empty)).unwrap(), None);
        assert!(basic_user(&headers("authorization", "Basic %%%")).is_err());
    }

    #[test]
    fn nonsense_keepalives_fall_back() {
        assert_eq!(
            keepalive(&headers("keepalive-ping-interval", "50")),
            Duration::from_secs(50)
        );
        for bad in ["0", "-3", "soon"] {
            assert_eq!(
                keepalive(&headers("keepalive-ping-interval", bad)),
                DEFAULT_KEEPALIVE
            );
        }
    }
}
