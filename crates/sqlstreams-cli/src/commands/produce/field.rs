//! Finding a message's keys and headers in its JSON.

use std::borrow::Cow;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use sqlstreams::Headers;

/// A key: the text of a string, or a number as it is spelled.
pub(super) fn key(line: &[u8], field: &str) -> Result<String, String> {
    let value = find(line, field, "key")?;
    match value.as_bytes().first() {
        Some(b'"') => serde_json::from_str(value).map_err(|error| format!("no key: {error}")),
        Some(b'-' | b'0'..=b'9') => Ok(value.to_owned()),
        _ => Err(format!("no key: field {field:?} is {}, not a string or a number", kind(value))),
    }
}

/// Headers: an object.
pub(super) fn headers(line: &[u8], field: &str) -> Result<Headers, String> {
    let value = find(line, field, "headers")?;
    match value.as_bytes().first() {
        Some(b'{') => serde_json::from_str(value).map_err(|error| format!("no headers: {error}")),
        _ => Err(format!("no headers: field {field:?} is {}, not an object", kind(value))),
    }
}

/// The id of a message: a whole number; null for none, as 0.
pub(super) fn id(line: &[u8], field: &str) -> Result<i64, String> {
    match find(line, field, "id")? {
        "null" => Ok(0),
        value => value.parse().ok().filter(|id| *id >= 0).ok_or_else(|| {
            format!("no id: field {field:?} is {}, not the id of a message or 0", kind(value))
        }),
    }
}

/// The value of a field, as it is spelled. Reads the object once and keeps nothing else of it.
fn find<'l>(line: &'l [u8], field: &str, what: &str) -> Result<&'l str, String> {
    let mut json = serde_json::Deserializer::from_slice(line);
    let found = Field(field)
        .deserialize(&mut json)
        .and_then(|found| json.end().map(|()| found))
        .map_err(|error| match error.is_data() {
            true => {
                format!("no {what}: the line is not a JSON object, so it has no field {field:?}")
            }
            false => format!("no {what}: the line is not JSON: {error}"),
        })?;
    found.map(RawValue::get).ok_or_else(|| format!("no {what}: there is no field {field:?}"))
}

fn kind(value: &str) -> &str {
    match value.as_bytes().first() {
        Some(b'"') => "a string",
        Some(b'-' | b'0'..=b'9') => value,
        Some(b'n') => "null",
        Some(b't' | b'f') => "a boolean",
        Some(b'[') => "an array",
        _ => "an object",
    }
}

/// Reads an object for one of its fields. Of several, the last counts, as for PostgreSQL.
struct Field<'f>(&'f str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<&'de RawValue>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(name) = map.next_key_seed(Name)? {
            if name == self.0 {
                found = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// The name of a field, borrowed unless it has escapes.
struct Name;

impl<'de> DeserializeSeed<'de> for Name {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Name {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a field")
    }

    fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(name))
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_and_numbers_are_keys() {
        let find = |line: &str| key(line.as_bytes(), "id");
        assert_eq!(find(r#"{"a": [{"id": 1}], "id": "acct-42"}"#), Ok("acct-42".to_owned()));
        assert_eq!(find(r#"{"id": 12345678901234567890}"#), Ok("12345678901234567890".to_owned()));
        assert_eq!(find(r#"{"id": -1.50}"#), Ok("-1.50".to_owned()));
        assert_eq!(find(r#"{"\u0069d": "caf\u00e9"}"#), Ok("café".to_owned()));
        assert_eq!(find(r#"{"id": 1, "id": 2}"#), Ok("2".to_owned()));
    }

    #[test]
    fn anything_else_is_named() {
        let find = |line: &str| key(line.as_bytes(), "id").unwrap_err();
        assert!(find(r#"{"other": 1}"#).contains(r#"no field "id""#));
        assert!(find(r#"{"id": null}"#).contains("null"));
        assert!(find(r#"{"id": true}"#).contains("a boolean"));
        assert!(find(r#"{"id": [1]}"#).contains("an array"));
        assert!(find(r#"{"id": {}}"#).contains("an object"));
        assert!(find("[1]").contains("not a JSON object"));
        assert!(find(r#"{"id": 1"#).contains("not JSON"));
        assert!(find(r#"{"id": 1} x"#).contains("not JSON"));
    }

    #[test]
    fn objects_are_headers_and_whole_numbers_ids() {
        let line = br#"{"h": {"a": [1]}, "id": 17, "none": null, "half": 0.5, "minus": -1}"#;
        assert_eq!(headers(line, "h").unwrap()["a"][0], 1);
        assert!(headers(line, "id").unwrap_err().contains("is 17, not an object"));
        assert!(headers(line, "x").unwrap_err().contains("no headers: there is no field"));
        assert_eq!((id(line, "id"), id(line, "none")), (Ok(17), Ok(0)));
        for wrong in ["h", "half", "minus", "x"] {
            assert!(id(line, wrong).unwrap_err().starts_with("no id: "), "{wrong}");
        }
    }
}
