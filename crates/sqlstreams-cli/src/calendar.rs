//! Points in time as text, also beyond the year 9999, in which jiff's calendar ends and PostgreSQL's goes on.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// The calendar repeats itself after so many years, which are always so long.
const CYCLE_YEARS: u64 = 400;
const CYCLE: u64 = 146_097 * 24 * 3600;
/// 2000-01-01, from which PostgreSQL counts microseconds, as an i64 whose ends are its infinities.
const EPOCH: Duration = Duration::from_secs(946_684_800);

/// `2026-03-01T12:00:00.000000Z`, with so many digits of the second; `infinity` as PostgreSQL has it.
pub(crate) fn text(at: SystemTime, digits: u8) -> String {
    if let Ok(at) = Timestamp::try_from(at) {
        return format!("{at:.precision$}", precision = usize::from(digits));
    }
    let later = at.duration_since(SystemTime::UNIX_EPOCH).ok().filter(|_| at < infinity());
    let Some(later) = later else {
        return if at < SystemTime::UNIX_EPOCH { "-infinity" } else { "infinity" }.to_owned();
    };
    let cycles = later.as_secs() / CYCLE;
    let within = SystemTime::UNIX_EPOCH + (later - Duration::from_secs(cycles * CYCLE));
    let text = text(within, digits);
    let (year, rest) = text.split_once('-').unwrap_or((&text, ""));
    let year = year.parse::<u64>().unwrap_or_default() + cycles * CYCLE_YEARS;
    format!("{year}-{rest}")
}

/// The same and other spellings; without a zone it is UTC. Nothing where it is no time.
pub(crate) fn parse(text: &str) -> Option<SystemTime> {
    let year =
        text.find('-').and_then(|end| Some((text[..end].parse::<u64>().ok()?, &text[end..])));
    let Some((year, rest)) = year.filter(|(year, _)| *year >= 9999) else {
        return within_jiff(text);
    };
    // Moved into 2000 to 2399.
    let cycles = (year - 2000) / CYCLE_YEARS;
    let within = within_jiff(&format!("{}{rest}", year - cycles * CYCLE_YEARS))?;
    let at = within.checked_add(Duration::from_secs(cycles.checked_mul(CYCLE)?))?;
    (at < infinity()).then_some(at)
}

/// What [`text`] writes, the infinities too.
pub(crate) fn parse_stored(text: &str) -> Option<SystemTime> {
    match text {
        "infinity" => Some(infinity()),
        "-infinity" => Some(before_all()),
        _ => parse(text),
    }
}

fn within_jiff(text: &str) -> Option<SystemTime> {
    // jiff would pass over the name of a zone (`[Europe/Berlin]`).
    if text.contains('[') {
        return None;
    }
    let at = match text.parse::<Timestamp>() {
        Ok(at) => at,
        Err(_) => TimeZone::UTC.to_timestamp(text.parse::<DateTime>().ok()?).ok()?,
    };
    SystemTime::try_from(at).ok()
}

/// What the driver makes of PostgreSQL's infinity.
pub(crate) fn infinity() -> SystemTime {
    SystemTime::UNIX_EPOCH + EPOCH + Duration::from_micros(i64::MAX.unsigned_abs())
}

/// The same of -infinity.
pub(crate) fn before_all() -> SystemTime {
    SystemTime::UNIX_EPOCH + EPOCH - Duration::from_micros(i64::MIN.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_500_000);
        assert_eq!(text(at, 6), "1970-01-01T00:00:01.500000Z");
        assert_eq!(text(at, 0), "1970-01-01T00:00:01Z");
        for text in ["1970-01-01T00:00:01.5Z", "1970-01-01 02:00:01.5+02:00"] {
            assert_eq!(parse(text), Some(at), "{text}");
        }
        assert_eq!(parse("1970-01-01"), Some(SystemTime::UNIX_EPOCH));
        assert!(parse("yesterday").is_none() && parse("").is_none() && parse("--").is_none());
    }

    #[test]
    fn years_go_on_after_9999() {
        for at in [
            "9999-12-31T23:59:59.999999Z",
            "10000-01-01T00:00:00.000000Z",
            "10000-02-29T00:00:00.000001Z",
            "12026-03-01T12:30:00.123456Z",
            "294276-12-31T23:59:59.999999Z",
        ] {
            assert_eq!(text(parse(at).unwrap(), 6), at);
        }
        let day = Duration::from_secs(24 * 3600);
        assert_eq!(parse("10000-01-01"), Some(parse("9999-12-31").unwrap() + day));
        assert_eq!(parse("12026-03-01T14:00+02:00"), parse("12026-03-01T12:00:00Z"));
        for wrong in
            ["10001-02-29", "10000-13-01", "12026", "295000-01-01", "99999999999999999999-01-01"]
        {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        assert_eq!(text(infinity(), 6), "infinity");
        assert_eq!(text(before_all(), 6), "-infinity");
        for at in [infinity(), before_all()] {
            assert_eq!(parse_stored(&text(at, 6)), Some(at));
            // Nobody names them in an option.
            assert_eq!(parse(&text(at, 6)), None);
        }
    }
}
