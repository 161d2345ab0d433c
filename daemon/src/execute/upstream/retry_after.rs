//! How long an upstream asks us to wait.

use std::time::Duration;

use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};
use time::OffsetDateTime;

/// The longest wait that is taken from an upstream; what asks for more gets this.
pub(super) const LONGEST: Duration = Duration::from_hours(1);

/// The wait asked for: `retry-after-ms`, else `Retry-After` as seconds, fractions allowed, or as a
/// date; a date counts from the answer's own, so that the clocks need not agree. What is negative or
/// past is no wait, what is absurd the longest; what is neither form is not there.
pub(in crate::execute) fn retry_after(
    headers: &HeaderMap,
    now: OffsetDateTime,
) -> Option<Duration> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    if let Some(millis) = text("retry-after-ms").and_then(number) {
        return Some(clamped(millis / 1000.0));
    }
    let value = text(RETRY_AFTER.as_str())?;
    if let Some(seconds) = number(value) {
        return Some(clamped(seconds));
    }
    let at = OffsetDateTime::from(httpdate::parse_http_date(value).ok()?);
    let sent = text(DATE.as_str()).and_then(|date| httpdate::parse_http_date(date).ok());
    let since = sent.map_or(now, OffsetDateTime::from);
    Some(clamped((at - since).as_seconds_f64()))
}

/// A decimal number; not the other things that Rust reads as one, such as `inf` and `nan`.
fn number(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b));
    text.parse().ok().filter(|_| plain)
}

fn clamped(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, LONGEST.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use reqwest::header::{HeaderName, HeaderValue};
    use time::macros::datetime;

    use super::*;

    fn wait(headers: &[(&str, &str)]) -> Option<Duration> {
        let headers = headers.iter().map(|(name, value)| {
            let name: HeaderName = name.parse().unwrap();
            (name, HeaderValue::from_str(value).unwrap())
        });
        retry_after(&headers.collect(), datetime!(2026-11-30 12:00:00 UTC))
    }

    #[test]
    fn every_form_is_read() {
        let seconds = |s: f64| Some(Duration::from_secs_f64(s));
        for (headers, expected) in [
            (&[("retry-after", "7")] as &[_], seconds(7.0)),
            (&[("retry-after", " 1.5 ")], seconds(1.5)),
            (&[("retry-after-ms", "250")], seconds(0.25)),
            (&[("retry-after-ms", "250"), ("retry-after", "9")], seconds(0.25)),
            (&[("retry-after-ms", "soon"), ("retry-after", "9")], seconds(9.0)),
            (&[("retry-after", "Mon, 30 Nov 2026 12:00:20 GMT")], seconds(20.0)),
            // The upstream's clock is an hour ahead of ours.
            (
                &[
                    ("retry-after", "Mon, 30 Nov 2026 13:00:20 GMT"),
                    ("date", "Mon, 30 Nov 2026 13:00:00 GMT"),
                ],
                seconds(20.0),
            ),
            // The two older forms of a date.
            (&[("retry-after", "Monday, 30-Nov-26 12:00:20 GMT")], seconds(20.0)),
            (&[("retry-after", "Mon Nov 30 12:00:20 2026")], seconds(20.0)),
        ] {
            assert_eq!(wait(headers), expected, "{headers:?}");
        }
    }

    #[test]
    fn what_is_absurd_is_clamped_and_what_is_neither_is_not_there() {
        for (value, expected) in [
            ("-5", Some(Duration::ZERO)),
            ("0", Some(Duration::ZERO)),
            ("Mon, 30 Nov 2026 11:00:00 GMT", Some(Duration::ZERO)),
            ("86400", Some(LONGEST)),
            ("1e300", Some(LONGEST)),
            ("9e999", Some(LONGEST)),
            ("Sun, 30 Nov 2036 12:00:00 GMT", Some(LONGEST)),
            ("", None),
            ("soon", None),
            ("inf", None),
            ("NaN", None),
            ("30 Nov 2026", None),
        ] {
            assert_eq!(wait(&[("retry-after", value)]), expected, "{value}");
        }
        assert_eq!(wait(&[]), None);
    }
}
