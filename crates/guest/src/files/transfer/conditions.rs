//! Conditional and range requests (RFC 9110, sections 13 and 14): what part of a file, if any, a client should get.

use std::{ops::Range, time::SystemTime};

use http::{
    header::{IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, RANGE},
    HeaderMap, HeaderName,
};

/// What identifies a state of a file.
#[derive(Clone, Debug)]
pub struct Validators {
    /// With its quotes.
    pub etag: String,
    pub modified: SystemTime,
}

/// The answer's kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Whole,
    Part(Range<u64>),
    NotModified,
    PreconditionFailed,
    /// No byte of the file is in the range.
    Unsatisfiable,
}

/// Whether the request asks for anything that `evaluate` looks at.
pub fn is_conditional(headers: &HeaderMap) -> bool {
    [
        RANGE,
        IF_MATCH,
        IF_NONE_MATCH,
        IF_MODIFIED_SINCE,
        IF_UNMODIFIED_SINCE,
        IF_RANGE,
    ]
    .iter()
    .any(|name| headers.contains_key(name))
}

/// Applies the preconditions in the order the standard gives.
pub fn preconditions(headers: &HeaderMap, current: &Validators) -> Outcome {
    if headers.contains_key(IF_MATCH) {
        if !names_tag(headers, IF_MATCH, &current.etag, false) {
            return Outcome::PreconditionFailed;
        }
    } else if date(headers, IF_UNMODIFIED_SINCE)
        .is_some_and(|since| seconds(current.modified) > seconds(since))
    {
        return Outcome::PreconditionFailed;
    }
    if headers.contains_key(IF_NONE_MATCH) {
        if names_tag(headers, IF_NONE_MATCH, &current.etag, true) {
            return Outcome::NotModified;
        }
    } else if date(headers, IF_MODIFIED_SINCE)
        .is_some_and(|since| seconds(current.modified) <= seconds(since))
    {
        return Outcome::NotModified;
    }
    Outcome::Whole
}

/// Applies preconditions, `If-Range` and `Range` to a file of `size` bytes. Several ranges are answered with the whole.
pub fn evaluate(headers: &HeaderMap, current: &Validators, size: u64) -> Outcome {
    match preconditions(headers, current) {
        Outcome::Whole => {}
        other => return other,
    }
    let Some(range) = headers.get(RANGE).and_then(|value| value.to_str().ok()) else {
        return Outcome::Whole;
    };
    if let Some(condition) = headers.get(IF_RANGE).and_then(|value| value.to_str().ok()) {
        let same = if condition.starts_with('"') || condition.starts_with("W/") {
            condition == current.etag
        } else {
            httpdate::parse_http_date(condition)
                .is_ok_and(|then| seconds(then) == seconds(current.modified))
        };
        if !same {
            return Outcome::Whole;
        }
    }
    parse_range(range, size)
}

fn parse_range(text: &str, size: u64) -> Outcome {
    let Some(spec) = text.trim().strip_prefix("bytes=") else {
        return Outcome::Whole;
    };
    let Some((first, last)) = spec.trim().split_once('-') else {
        return Outcome::Whole;
    };
    let number = |text: &str| -> Option<u64> {
        let text = text.trim();
        // Larger than any file means the same as larger than this one.
        text.bytes()
            .all(|byte| byte.is_ascii_digit())
            .then(|| text.parse().unwrap_or(u64::MAX))
    };
    let (start, end) = match (first.trim().is_empty(), last.trim().is_empty()) {
        (true, true) => return Outcome::Whole,
        (true, false) => match number(last) {
            Some(suffix) => (size.saturating_sub(suffix), size),
            None => return Outcome::Whole,
        },
        (false, true) => match number(first) {
            Some(start) => (start, size),
            None => return Outcome::Whole,
        },
        (false, false) => match (number(first), number(last)) {
            (Some(start), Some(last)) if start <= last => (start, last.saturating_add(1).min(size)),
            _ => return Outcome::Whole,
        },
    };
    if start >= end {
        return Outcome::Unsatisfiable;
    }
    Outcome::Part(start..end)
}

fn names_tag(headers: &HeaderMap, name: HeaderName, etag: &str, weak: bool) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(','))
        .map(str::trim)
        .any(|tag| tag == "*" || tag == etag || (weak && tag.strip_prefix("W/") == Some(etag)))
}

fn date(headers: &HeaderMap, name: HeaderName) -> Option<SystemTime> {
    httpdate::parse_http_date(headers.get(name)?.to_str().ok()?).ok()
}

/// Dates in headers have no fractions.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const BEFORE: &str = "Thu, 01 Jan 1970 00:16:39 GMT";
    const SAME: &str = "Thu, 01 Jan 1970 00:16:40 GMT";

    fn outcome(fields: &[(HeaderName, &str)]) -> Outcome {
        let headers = fields
            .iter()
            .map(|(name, value)| (name.clone(), value.parse().unwrap()))
            .collect();
        let current = Validators {
            etag: "\"now\"".into(),
            modified: SystemTime::UNIX_EPOCH + Duration::from_millis(1_000_500),
        };
        evaluate(&headers, &current, 100)
    }

    #[test]
    fn ranges() {
        for (range, expected) in [
            ("bytes=0-9", Outcome::Part(0..10)),
            ("bytes=90-", Outcome::Part(90..100)),
            ("bytes=-5", Outcome::Part(95..100)),
            ("bytes=-500", Outcome::Part(0..100)),
            ("bytes=50-500", Outcome::Part(50..100)),
            ("bytes=0-99999999999999999999999", Outcome::Part(0..100)),
            ("bytes=100-", Outcome::Unsatisfiable),
            ("bytes=200-300", Outcome::Unsatisfiable),
            ("bytes=-0", Outcome::Unsatisfiable),
            ("bytes=9-3", Outcome::Whole),
            ("bytes=0-1,5-6", Outcome::Whole),
            ("bytes=-", Outcome::Whole),
            ("bytes=x-y", Outcome::Whole),
            ("lines=1-2", Outcome::Whole),
        ] {
            assert_eq!(outcome(&[(RANGE, range)]), expected, "{range}");
        }
    }

    #[test]
    fn conditions() {
        let range = (RANGE, "bytes=0-9");
        for (fields, expected) in [
            (
                vec![(IF_NONE_MATCH, "\"a\", W/\"now\"")],
                Outcome::NotModified,
            ),
            (vec![(IF_NONE_MATCH, "*")], Outcome::NotModified),
            (
                vec![(IF_NONE_MATCH, "\"a\""), (IF_MODIFIED_SINCE, SAME)],
                Outcome::Whole,
            ),
            (vec![(IF_MODIFIED_SINCE, SAME)], Outcome::NotModified),
            (vec![(IF_MODIFIED_SINCE, BEFORE)], Outcome::Whole),
            (vec![(IF_MODIFIED_SINCE, "nonsense")], Outcome::Whole),
            (vec![(IF_MATCH, "\"now\"")], Outcome::Whole),
            (vec![(IF_MATCH, "W/\"now\"")], Outcome::PreconditionFailed),
            (
                vec![(IF_UNMODIFIED_SINCE, BEFORE)],
                Outcome::PreconditionFailed,
            ),
            (vec![(IF_UNMODIFIED_SINCE, SAME)], Outcome::Whole),
            (
                vec![range.clone(), (IF_RANGE, "\"now\"")],
                Outcome::Part(0..10),
            ),
            (vec![range.clone(), (IF_RANGE, "\"old\"")], Outcome::Whole),
            (vec![range.clone(), (IF_RANGE, SAME)], Outcome::Part(0..10)),
            (vec![range, (IF_RANGE, BEFORE)], Outcome::Whole),
        ] {
            assert_eq!(outcome(&fields), expected, "{fields:?}");
        }
    }
}
