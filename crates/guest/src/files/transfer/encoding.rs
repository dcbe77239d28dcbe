//! Chooses how a download is encoded (RFC 9110, section 12.5.3).

use http::{header::ACCEPT_ENCODING, HeaderMap};

/// An encoding that we can send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    Identity,
    Gzip,
}

/// What a client accepts, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Weights in thousandths; zero means never.
    gzip: u16,
    identity: u16,
}

impl Accepted {
    /// Reads `Accept-Encoding`. What cannot be read is ignored.
    pub fn of(headers: &HeaderMap) -> Self {
        let (mut gzip, mut identity, mut others) = (None, None, None);
        let fields = headers.get_all(ACCEPT_ENCODING).iter();
        for item in fields
            .filter_map(|value| value.to_str().ok())
            .flat_map(|text| text.split(','))
        {
            let mut parts = item.split(';');
            let name = parts.next().unwrap_or_default().trim().to_ascii_lowercase();
            let weight = parts.find_map(weight).unwrap_or(1000);
            match name.as_str() {
                "gzip" | "x-gzip" => gzip = Some(weight),
                "identity" => identity = Some(weight),
                "*" => others = Some(weight),
                _ => {}
            }
        }
        Self {
            gzip: gzip.or(others).unwrap_or(0),
            // Not mentioned it is acceptable, but less welcome than what is; only "*;q=0" rules it out.
            identity: identity.unwrap_or(match others {
                Some(0) => 0,
                _ => 1,
            }),
        }
    }

    /// The encoding to use; gzip if both are equally welcome. None if neither is acceptable.
    pub fn best(self) -> Option<Encoding> {
        match (self.gzip, self.identity) {
            (0, 0) => None,
            (gzip, identity) if gzip >= identity => Some(Encoding::Gzip),
            _ => Some(Encoding::Identity),
        }
    }

    /// Whether the plain bytes are acceptable, however unwelcome.
    pub fn identity(self) -> bool {
        self.identity > 0
    }
}

/// Reads `q=0.5` as 500.
fn weight(parameter: &str) -> Option<u16> {
    let (name, value) = parameter.split_once('=')?;
    if !name.trim().eq_ignore_ascii_case("q") {
        return None;
    }
    let value: f32 = value.trim().parse().ok()?;
    (0.0..=1.0)
        .contains(&value)
        .then(|| (value * 1000.0).round() as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(text: &str) -> Accepted {
        Accepted::of(&HeaderMap::from_iter([(
            ACCEPT_ENCODING,
            text.parse().unwrap(),
        )]))
    }

    #[test]
    fn chooses_by_weight() {
        for (text, expected) in [
            ("gzip, deflate", Some(Encoding::Gzip)),
            ("deflate, br", Some(Encoding::Identity)),
            ("", Some(Encoding::Identity)),
            ("*", Some(Encoding::Gzip)),
            ("GZIP;q=0.5", Some(Encoding::Gzip)),
            ("gzip;q=0.5, identity", Some(Encoding::Identity)),
            ("gzip;q=0", Some(Encoding::Identity)),
            ("identity;q=0, br", None),
            ("*;q=0", None),
            ("gzip, *;q=0", Some(Encoding::Gzip)),
            ("identity, *;q=0", Some(Encoding::Identity)),
            ("identity;q=0, *;q=0.1", Some(Encoding::Gzip)),
        ] {
            assert_eq!(accepted(text).best(), expected, "{text:?}");
        }
        assert_eq!(
            Accepted::of(&HeaderMap::new()).best(),
            Some(Encoding::Identity)
        );
        assert!(accepted("gzip").identity());
        assert!(!accepted("gzip, identity;q=0").identity());
    }
}
