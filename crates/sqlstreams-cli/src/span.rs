//! How long something takes, as people write it: `500ms`, `1h 30m`, `7d`.

use std::time::Duration;

/// What is written where nothing makes sense of it.
const HINT: &str = "write it as 500ms, 15s, 5m, 1h 30m, 7d or 2w";

const SECOND: u128 = 1_000_000_000;
const MINUTE: u128 = 60 * SECOND;
const HOUR: u128 = 60 * MINUTE;
/// Of 24 hours: what is meant by a day is not the calendar's.
const DAY: u128 = 24 * HOUR;

/// Numbers with units, added up; what is longer than everything is [`Duration::MAX`].
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let mut rest = text.trim();
    if rest.starts_with('-') {
        return Err("it has to be longer than nothing".to_owned());
    }
    if rest.is_empty() {
        return Err(HINT.to_owned());
    }
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let (number, after) = split(rest, |c| c.is_ascii_digit() || c == '.');
        let (unit, after) = split(after.trim_start(), |c| c.is_alphabetic());
        if number.is_empty() {
            return Err(HINT.to_owned());
        }
        if unit.is_empty() {
            return Err(format!("it lacks a unit: write {number}s for seconds"));
        }
        let part = unit_nanos(unit).and_then(|unit| times(number, unit));
        nanos = nanos.saturating_add(part.ok_or(HINT)?);
        rest = after.trim_start_matches([' ', ',']);
    }
    Ok(u64::try_from(nanos / SECOND)
        .map_or(Duration::MAX, |seconds| Duration::new(seconds, (nanos % SECOND) as u32)))
}

fn split(text: &str, belongs: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !belongs(c)).unwrap_or(text.len()))
}

fn unit_nanos(unit: &str) -> Option<u128> {
    Some(match unit {
        "ns" | "nanosecond" | "nanoseconds" => 1,
        "us" | "µs" | "μs" | "microsecond" | "microseconds" => 1_000,
        "ms" | "msec" | "msecs" | "millisecond" | "milliseconds" => 1_000_000,
        "s" | "sec" | "secs" | "second" | "seconds" => SECOND,
        "m" | "min" | "mins" | "minute" | "minutes" => MINUTE,
        "h" | "hr" | "hrs" | "hour" | "hours" => HOUR,
        "d" | "day" | "days" => DAY,
        "w" | "wk" | "wks" | "week" | "weeks" => 7 * DAY,
        _ => return None,
    })
}

/// A decimal number of a unit; parts of a nanosecond are dropped.
fn times(number: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return None;
    }
    // Digits alone: what does not parse is too large.
    let mut nanos = whole.parse().unwrap_or(u128::MAX).saturating_mul(unit);
    let mut place = unit;
    for digit in fraction.bytes() {
        // The places after these are parts of nanoseconds, of any unit.
        let tenth = place / 10;
        nanos = nanos.saturating_add(u128::from(digit - b'0') * tenth);
        place = tenth;
    }
    Some(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_units() {
        for (text, seconds) in [
            ("15s", 15.0),
            ("500ms", 0.5),
            ("1m 30s", 90.0),
            ("1h30m", 5_400.0),
            ("1.5h", 5_400.0),
            ("0.001s", 0.001),
            ("7d", 604_800.0),
            ("7 days", 604_800.0),
            ("1w", 604_800.0),
            ("1 week, 1 day", 691_200.0),
            ("365d", 31_536_000.0),
            (" 2 hours 5 minutes ", 7_500.0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_told() {
        for (text, said) in [
            ("15", "write 15s"),
            ("1h 30", "write 30s"),
            ("-1s", "longer than nothing"),
            ("inf", HINT),
            ("infs", HINT),
            ("soon", HINT),
            ("", HINT),
            ("d", HINT),
            ("1y", HINT),
            ("1mo", HINT),
            ("1..5h", HINT),
            (".5h", HINT),
            ("1e5s", HINT),
            ("1h ago", HINT),
        ] {
            assert!(parse(text).unwrap_err().contains(said), "{text}: {:?}", parse(text));
        }
    }

    #[test]
    fn nothing_is_too_long_to_be_read() {
        assert_eq!(parse("99999999999d"), Ok(Duration::from_secs(99_999_999_999 * 86_400)));
        for text in ["99999999999999999999d", &format!("{}w", "9".repeat(300))] {
            assert_eq!(parse(text), Ok(Duration::MAX), "{text}");
        }
    }
}
