//! Times as log lines show them.

use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};

/// RFC 3339 in UTC with microseconds.
pub fn rfc3339(time: SystemTime) -> String {
    DateTime::<Utc>::from(time).to_rfc3339_opts(SecondsFormat::Micros, true)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn the_form_is_fixed() {
        assert_eq!(rfc3339(UNIX_EPOCH), "1970-01-01T00:00:00.000000Z");
        let late = UNIX_EPOCH + Duration::new(951_782_400, 1_000);
        assert_eq!(rfc3339(late), "2000-02-29T00:00:00.000001Z");
    }
}
