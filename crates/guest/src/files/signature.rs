//! Signed file URLs: whoever knows the access token can hand out the right to read or write one path.

use base64::{engine::general_purpose::STANDARD_NO_PAD, Engine};
use sha2::{Digest, Sha256};

use super::failure::unauthorized;
use crate::agent::{error::HttpError, state::secrets_equal};

/// What a signature allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

impl Operation {
    fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The query parameters a signature covers, exactly as the client sent them (decoded, not resolved).
#[derive(Clone, Copy, Debug, Default)]
pub struct Signed<'a> {
    pub path: &'a str,
    pub username: &'a str,
    pub signature: &'a str,
    /// Decimal unix seconds.
    pub expiration: Option<&'a str>,
}

impl Signed<'_> {
    /// Checks the signature against the sandbox's access token at the time `now` (unix seconds).
    ///
    /// # Errors
    /// 401 if it is absent, wrong or expired.
    pub fn verify(&self, operation: Operation, token: &str, now: i64) -> Result<(), HttpError> {
        if self.signature.is_empty() {
            return Err(unauthorized("missing access token or signature"));
        }
        let expected = sign(operation, self.path, self.username, token, self.expiration);
        if !secrets_equal(expected.as_bytes(), self.signature.as_bytes()) {
            return Err(unauthorized("invalid signature"));
        }
        match self.expiration.map(str::parse::<i64>) {
            None => Ok(()),
            Some(Ok(until)) if now < until => Ok(()),
            Some(Ok(_)) => Err(unauthorized("signature is already expired")),
            Some(Err(_)) => Err(unauthorized("invalid signature")),
        }
    }
}

fn sign(
    operation: Operation,
    path: &str,
    username: &str,
    token: &str,
    expiration: Option<&str>,
) -> String {
    let mut hash = Sha256::new();
    for part in [path, ":", operation.as_str(), ":", username, ":", token] {
        hash.update(part);
    }
    if let Some(expiration) = expiration {
        hash.update(":");
        hash.update(expiration);
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::StatusCode;

    // Computed with `printf %s '/a b:read:user:secret' | openssl dgst -sha256 -binary | base64`, and so on.
    const PLAIN: &str = "v1_PEA/icv+z+JO9bsZ7QQJfW5MQV9ADdOES2Wk1FxeiFU";
    const EXPIRING: &str = "v1_aYxfZugLCIua9M8Qx60p6NZ6i57eU9ONDEgaXEv40/M";

    fn plain() -> Signed<'static> {
        Signed {
            path: "/a b",
            username: "user",
            signature: PLAIN,
            expiration: None,
        }
    }

    fn expiring() -> Signed<'static> {
        Signed {
            path: "",
            username: "",
            signature: EXPIRING,
            expiration: Some("2000"),
        }
    }

    #[test]
    fn accepts_known_signatures() {
        plain().verify(Operation::Read, "secret", 0).unwrap();
        expiring().verify(Operation::Write, "secret", 1999).unwrap();
    }

    #[test]
    fn refuses_every_change() {
        let refused = |signed: Signed<'_>, operation, token| {
            let failure = signed.verify(operation, token, 0).unwrap_err();
            assert_eq!(
                (failure.status, failure.message.as_str()),
                (StatusCode::UNAUTHORIZED, "invalid signature")
            );
        };
        refused(plain(), Operation::Write, "secret");
        refused(plain(), Operation::Read, "other");
        refused(
            Signed {
                path: "/a",
                ..plain()
            },
            Operation::Read,
            "secret",
        );
        refused(
            Signed {
                username: "root",
                ..plain()
            },
            Operation::Read,
            "secret",
        );
        refused(
            Signed {
                expiration: Some("9"),
                ..plain()
            },
            Operation::Read,
            "secret",
        );
        refused(
            Signed {
                expiration: None,
                ..expiring()
            },
            Operation::Write,
            "secret",
        );
        refused(
            Signed {
                expiration: Some("2001"),
                ..expiring()
            },
            Operation::Write,
            "secret",
        );
        refused(
            Signed {
                signature: "v1_",
                ..plain()
            },
            Operation::Read,
            "secret",
        );
    }

    #[test]
    fn refuses_late_and_missing() {
        let late = expiring()
            .verify(Operation::Write, "secret", 2000)
            .unwrap_err();
        assert_eq!(late.message, "signature is already expired");
        let missing = Signed {
            signature: "",
            ..plain()
        };
        assert_eq!(
            missing
                .verify(Operation::Read, "secret", 0)
                .unwrap_err()
                .status,
            401
        );
    }
}
