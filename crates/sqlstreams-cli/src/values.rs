//! Values of options that are more than a number or a word.

use std::time::{Duration, SystemTime};

use serde_json::Value;
use sqlstreams::{Binding, Headers, Missed, Mode, PayloadType, Start};

use crate::{calendar, span};

/// What a message can be put off by.
const LONGEST: Duration = Duration::from_secs(10_000 * 365 * 24 * 3600);

/// `500ms`, `1m 30s`, `7d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    match duration_or_none(text)? {
        Duration::ZERO => Err("it has to be longer than nothing".to_owned()),
        duration => Ok(duration),
    }
}

/// The same, or `0s`.
pub(crate) fn duration_or_none(text: &str) -> Result<Duration, String> {
    match span::parse(text)? {
        duration if duration <= LONGEST => Ok(duration),
        _ => Err("it is too long: at most 10,000 years, 3650000d".to_owned()),
    }
}

/// `on` or `off`.
pub(crate) fn on_or_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("write on or off".to_owned()),
    }
}

/// `beginning`, `latest`, an id, a time, or how long ago.
pub(crate) fn start(text: &str) -> Result<Start, String> {
    let text = text.trim();
    match text {
        "beginning" => return Ok(Start::Beginning),
        "latest" => return Ok(Start::Latest),
        _ => {}
    }
    if let Ok(id) = text.parse::<i64>() {
        return match id {
            1.. => Ok(Start::Id(id)),
            _ => Err("ids begin at 1".to_owned()),
        };
    }
    if let Some(at) = calendar::parse(text) {
        return Ok(Start::Time(at));
    }
    if let Some(ago) = text.strip_suffix("ago")
        && let Ok(ago) = span::parse(ago)
    {
        // Longer ago than there are computers is before everything.
        let at = SystemTime::now().checked_sub(ago).filter(|at| *at >= SystemTime::UNIX_EPOCH);
        return Ok(at.map_or(Start::Beginning, Start::Time));
    }
    Err("write beginning, latest, an id (1042), a time (2026-03-01T12:00:00Z) or how long ago (\"2h ago\", \"1d ago\")"
        .to_owned())
}

/// `2026-03-01T12:00:00Z`; without a zone it is UTC.
pub(crate) fn time(text: &str) -> Result<SystemTime, String> {
    match calendar::parse(text.trim()) {
        Some(at) if at <= SystemTime::UNIX_EPOCH + LONGEST => Ok(at),
        Some(_) => Err("it is more than 10,000 years ahead".to_owned()),
        None => Err("write a time: 2026-03-01T12:00:00Z".to_owned()),
    }
}

/// Where a delayed message waits: its time and its id.
pub(crate) fn due(text: &str) -> Result<(SystemTime, i64), String> {
    let place = text.trim().split_once('/');
    let place = place.and_then(|(at, id)| Some((calendar::parse(at)?, id.parse().ok()?)));
    place.ok_or_else(|| "write a time and an id: 2026-03-01T12:00:00Z/17".to_owned())
}

/// A pattern over routing keys, or JSON with `pattern`, `headers` or both.
pub(crate) fn binding(text: &str) -> Result<Binding, String> {
    if !text.trim_start().starts_with('{') {
        return Ok(text.into());
    }
    let mut object = headers(text)?;
    let pattern = match object.remove("pattern") {
        None | Some(Value::Null) => None,
        Some(Value::String(pattern)) => Some(pattern),
        Some(_) => return Err("\"pattern\" has to be a string".to_owned()),
    };
    let headers = match object.remove("headers") {
        None | Some(Value::Null) => Headers::new(),
        Some(Value::Object(headers)) => headers,
        Some(_) => return Err("\"headers\" has to be an object".to_owned()),
    };
    if let Some(name) = object.keys().next() {
        return Err(format!("a binding has \"pattern\", \"headers\" or both, not {name:?}"));
    }
    let binding = pattern.map_or_else(|| Binding::headers(Headers::new()), Binding::from);
    Ok(headers.into_iter().fold(binding, |binding, (name, value)| binding.header(name, value)))
}

/// A JSON object.
pub(crate) fn headers(text: &str) -> Result<Headers, String> {
    serde_json::from_str(text).map_err(|error| format!("it is not a JSON object: {error}"))
}

/// `json`, `jsonb`, `text` or `bytea`.
pub(crate) fn payload_type(text: &str) -> Result<PayloadType, String> {
    text.parse().map_err(|_| "choose json, jsonb, text or bytea".to_owned())
}

/// `parallel`, `ordered` or `fair`.
pub(crate) fn mode(text: &str) -> Result<Mode, String> {
    text.parse().map_err(|_| "choose parallel, ordered or fair".to_owned())
}

/// `skip`, `once` or `all`.
pub(crate) fn missed(text: &str) -> Result<Missed, String> {
    text.parse().map_err(|_| "choose skip, once or all".to_owned())
}

/// A limit, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit<T>(pub(crate) Option<T>);

/// `none`, or what `parse` reads.
pub(crate) fn limit_of<T>(
    parse: impl Fn(&str) -> Result<T, String> + Clone,
) -> impl Fn(&str) -> Result<Limit<T>, String> + Clone {
    move |text| match text.trim() {
        "none" => Ok(Limit(None)),
        text => parse(text).map(Some).map(Limit).map_err(|error| format!("{error}, or none")),
    }
}

/// A number, at least 1.
pub(crate) fn number(text: &str) -> Result<u64, String> {
    match text.replace(['_', ','], "").parse() {
        Ok(0) => Err("it has to be at least 1".to_owned()),
        Ok(number) if number <= i64::MAX.unsigned_abs() => Ok(number),
        _ => Err("write a whole number".to_owned()),
    }
}

/// `500MB`, `10GB`, `1TiB`; without a unit bytes.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let (digits, unit) =
        text.split_at(text.find(|c: char| c.is_alphabetic()).unwrap_or(text.len()));
    let unit: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" | "k" => 1_000,
        "mb" | "m" => 1_000_000,
        "gb" | "g" => 1_000_000_000,
        "tb" | "t" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err("write a size: 500MB, 10GB or 1TiB".to_owned()),
    };
    let number = number(digits.trim()).map_err(|error| format!("{error} of bytes: 500MB, 10GB"))?;
    let bytes = number.checked_mul(unit).filter(|bytes| *bytes <= i64::MAX.unsigned_abs());
    bytes.ok_or_else(|| "it is too large".to_owned())
}

/// A number of things, at least one.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.replace('_', "").parse() {
        Ok(0) => Err("it has to be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("it is not a whole number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_bounds() {
        assert_eq!(duration("1m 30s"), Ok(Duration::from_secs(90)));
        assert!(duration("0s").is_err() && duration("0d").is_err() && duration("-1s").is_err());
        assert_eq!(duration_or_none("0s"), Ok(Duration::ZERO));
        assert!(duration_or_none("-1s").is_err() && duration_or_none("0").is_err());
        assert_eq!(duration("3650000d"), Ok(LONGEST));
        for long in ["3650000d 1ns", "99999999999d", "99999999999999999999999999999999999999999w"] {
            assert!(duration(long).unwrap_err().contains("too long"), "{long}");
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("1000"), Ok(1_000));
        assert_eq!(size("10GB"), Ok(10_000_000_000));
        assert_eq!(size("2 gib"), Ok(2 << 30));
        for wrong in ["", "GB", "-1", "1.5GB", "1 XB", "0", "9999999999TB"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(limit_of(size)("none"), Ok(Limit(None)));
        assert_eq!(limit_of(size)("1kB"), Ok(Limit(Some(1_000))));
    }

    #[test]
    fn bindings_are_patterns_or_json() {
        assert_eq!(binding("a.*"), Ok("a.*".into()));
        let both = Binding::from("a.#").header("n", 1);
        assert_eq!(binding(r#" {"headers": {"n": 1}, "pattern": "a.#"}"#), Ok(both));
        assert_eq!(binding(r#"{"headers": {"n": 1}}"#), Ok(Binding::headers([("n", 1)])));
        for wrong in ["{", r#"{"pattern": 1}"#, r#"{"headers": []}"#, r#"{"header": {}}"#] {
            assert!(binding(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn starts_are_words_ids_or_times() {
        let noon = SystemTime::UNIX_EPOCH + Duration::from_secs(12 * 3600);
        assert_eq!(start("beginning"), Ok(Start::Beginning));
        assert_eq!(start("latest"), Ok(Start::Latest));
        assert_eq!(start("1042"), Ok(Start::Id(1042)));
        for text in ["1970-01-01T12:00:00Z", "1970-01-01T14:00+02:00", "1970-01-01 12:00"] {
            assert_eq!(start(text), Ok(Start::Time(noon)), "{text}");
        }
        assert_eq!(start("1970-01-01"), Ok(Start::Time(SystemTime::UNIX_EPOCH)));
        assert!(matches!(start("2h ago"), Ok(Start::Time(at)) if at < SystemTime::now()));
        let day = Duration::from_secs(24 * 3600 + 60);
        assert!(matches!(start("1d ago"), Ok(Start::Time(at)) if at.elapsed().unwrap() < day));
        assert_eq!(start("99999999999h ago"), Ok(Start::Beginning));
        assert_eq!(start("99999999999999999999999w ago"), Ok(Start::Beginning));
        assert!(start("0").is_err() && start("-5").is_err() && start("yesterday").is_err());
    }
}
