//! The query of `/files`. Parsed by ourselves because a path that is no UTF-8 must be refused, not repaired.

use super::super::{failure::bad_request, signature::Signed};
use crate::agent::error::HttpError;

/// The parameters, decoded. An empty parameter counts as absent where that makes no difference to the client.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Query {
    pub path: Option<String>,
    pub username: Option<String>,
    pub signature: Option<String>,
    pub signature_expiration: Option<String>,
}

impl Query {
    /// Parses what follows the question mark. Of a repeated parameter the first counts, unknown ones are ignored.
    ///
    /// # Errors
    /// 400 if a known parameter is not UTF-8.
    pub fn parse(text: Option<&str>) -> Result<Self, HttpError> {
        let mut query = Self::default();
        for pair in text.unwrap_or_default().split('&') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let slot = match decode(key).as_slice() {
                b"path" => &mut query.path,
                b"username" => &mut query.username,
                b"signature" => &mut query.signature,
                b"signature_expiration" => &mut query.signature_expiration,
                _ => continue,
            };
            let value = String::from_utf8(decode(value))
                .map_err(|_| bad_request(format!("query parameter '{key}' is not valid UTF-8")))?;
            slot.get_or_insert(value);
        }
        Ok(query)
    }

    /// The part that a signature covers.
    pub fn signed(&self) -> Signed<'_> {
        Signed {
            path: self.path.as_deref().unwrap_or_default(),
            username: self.username.as_deref().unwrap_or_default(),
            signature: self.signature.as_deref().unwrap_or_default(),
            expiration: self.signature_expiration.as_deref(),
        }
    }

    /// The user asked for.
    pub fn user(&self) -> Option<&str> {
        self.username.as_deref().filter(|name| !name.is_empty())
    }

    /// The path, if it says anything.
    pub fn named_path(&self) -> Option<&str> {
        self.path.as_deref().filter(|path| !path.is_empty())
    }
}

/// Undoes form encoding. A broken escape stays as it is.
fn decode(text: &str) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        match first {
            b'+' => decoded.push(b' '),
            b'%' => match after {
                [high, low, beyond @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                    decoded.push(hex(*high) << 4 | hex(*low));
                    rest = beyond;
                }
                _ => decoded.push(b'%'),
            },
            other => decoded.push(other),
        }
    }
    decoded
}

fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_and_takes_the_first() {
        let query = Query::parse(Some(
            "path=%2fa+b%2Bc%&username=u&path=other&x=%FF&signature_expiration=7",
        ))
        .unwrap();
        assert_eq!(query.path.as_deref(), Some("/a b+c%"));
        assert_eq!(query.user(), Some("u"));
        assert_eq!(query.signed().expiration, Some("7"));
        assert_eq!(Query::parse(None).unwrap(), Query::default());
        assert_eq!(
            Query::parse(Some("path=&username=")).unwrap().named_path(),
            None
        );
        assert_eq!(Query::parse(Some("username=")).unwrap().user(), None);
    }

    #[test]
    fn refuses_what_is_no_text() {
        assert_eq!(Query::parse(Some("path=%ff")).unwrap_err().status, 400);
    }
}
