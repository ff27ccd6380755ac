//! Messages as lines of JSON, with the names that `consume --json` has for what they have.
//!
//! The first line of an export says what stream it is from, the last how many messages there were: what is cut off is noticed. Files without
//! both are read as well.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use sqlstreams::{PayloadType, Record};

use super::{About, base64};
use crate::{calendar, payload};

/// A line of a file of messages.
#[derive(Debug, PartialEq)]
pub(crate) enum Line {
    /// The first line of an export.
    About(About),
    /// A message.
    Message(Box<Record<Vec<u8>>>),
    /// The last line of an export.
    End(End),
}

/// What the last line of an export says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct End {
    pub(crate) messages: u64,
    /// Everything up to here is in the file.
    pub(crate) upto: i64,
}

#[derive(Serialize)]
struct AboutLine<'a> {
    export: &'a About,
}

#[derive(Serialize)]
struct EndLine {
    end: End,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields<'a> {
    export: Option<About>,
    end: Option<End>,
    id: Option<i64>,
    key: Option<String>,
    routing_key: Option<String>,
    #[serde(borrow)]
    headers: Option<&'a RawValue>,
    produced_at: Option<String>,
    expires_at: Option<String>,
    #[serde(default)]
    tombstone: bool,
    /// What `consume` adds; it says nothing about the message.
    #[serde(default, rename = "attempt")]
    _attempt: Option<u64>,
    #[serde(borrow, default, deserialize_with = "present")]
    payload: Option<&'a RawValue>,
    payload_text: Option<String>,
    payload_base64: Option<String>,
}

/// JSON's `null` is a payload, too.
fn present<'de, D: Deserializer<'de>>(value: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(value).map(Some)
}

/// Appends the first line.
pub(crate) fn write_about(out: &mut Vec<u8>, about: &About) {
    write_json(out, &AboutLine { export: about });
    out.push(b'\n');
}

/// Appends the last line.
pub(crate) fn write_end(out: &mut Vec<u8>, end: End) {
    write_json(out, &EndLine { end });
    out.push(b'\n');
}

/// Appends a message. JSON is written as it is, text as a string, bytes as base64 under a name of its own; so is JSON that is spelled in more
/// than one line or with blanks around it, since that would be lost.
pub(crate) fn write(out: &mut Vec<u8>, record: &Record<Vec<u8>>, payload_type: PayloadType) {
    out.extend_from_slice(b"{\"id\":");
    write_json(out, &record.id);
    out.extend_from_slice(b",\"key\":");
    write_json(out, &record.key);
    out.extend_from_slice(b",\"routing_key\":");
    write_json(out, &record.routing_key);
    out.extend_from_slice(b",\"headers\":");
    // Line feeds stand between tokens only.
    let headers = record.headers.as_deref().unwrap_or("null");
    out.extend(headers.bytes().map(|b| if matches!(b, b'\n' | b'\r') { b' ' } else { b }));
    out.extend_from_slice(b",\"produced_at\":");
    write_json(out, &calendar::text(record.produced_at, 6));
    out.extend_from_slice(b",\"expires_at\":");
    write_json(out, &record.expires_at.map(|at| calendar::text(at, 6)));
    out.extend_from_slice(b",\"tombstone\":");
    write_json(out, &record.payload.is_none());
    let Some(bytes) = &record.payload else {
        out.extend_from_slice(b",\"payload\":null}\n");
        return;
    };
    match payload_type {
        PayloadType::Json | PayloadType::Jsonb if is_bare(bytes) => {
            out.extend_from_slice(b",\"payload\":");
            out.extend_from_slice(bytes);
        }
        PayloadType::Json | PayloadType::Jsonb => {
            out.extend_from_slice(b",\"payload_text\":");
            write_json(out, &String::from_utf8_lossy(bytes));
        }
        PayloadType::Bytea => {
            out.extend_from_slice(b",\"payload_base64\":\"");
            base64::encode(bytes, out);
            out.push(b'"');
        }
        _ => {
            out.extend_from_slice(b",\"payload\":");
            write_json(out, &payload::to_value(bytes, payload_type));
        }
    }
    out.extend_from_slice(b"}\n");
}

/// Whether JSON comes back as it is from within a line.
fn is_bare(json: &[u8]) -> bool {
    let is_blank = |b: Option<&u8>| b.is_some_and(|b| matches!(b, b' ' | b'\t'));
    !json.iter().any(|b| matches!(b, b'\n' | b'\r'))
        && !is_blank(json.first())
        && !is_blank(json.last())
}

fn write_json(out: &mut Vec<u8>, value: &impl Serialize) {
    // Text and numbers cannot fail, and neither can a vector.
    let _ = serde_json::to_writer(out, value);
}

/// Reads a line. `payload_type` is the stream's that it is for.
pub(crate) fn parse(line: &[u8], payload_type: PayloadType) -> Result<Line, String> {
    let text = std::str::from_utf8(line)
        .map_err(|e| format!("it is not UTF-8: byte {} is wrong", e.valid_up_to()))?;
    let mut fields: Fields<'_> = serde_json::from_str(text).map_err(|e| {
        // It names a line and column of its own.
        let text = e.to_string();
        let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _)| text);
        format!("{text} (column {})", e.column())
    })?;
    if let Some(about) = fields.export {
        return Ok(Line::About(about));
    }
    if let Some(end) = fields.end {
        return Ok(Line::End(end));
    }
    let id = fields.id.ok_or("it has no \"id\"")?;
    let produced_at = fields.produced_at.take().ok_or("it has no \"produced_at\"")?;
    let time = |name: &str, text: &str| {
        calendar::parse_stored(text).ok_or_else(|| format!("{name:?} is no time: {text:?}"))
    };
    let mut record = Record::new(id, time("produced_at", &produced_at)?, None);
    let expires_at = fields.expires_at.as_deref();
    record.expires_at = expires_at.map(|text| time("expires_at", text)).transpose()?;
    record.payload = fields.take_payload(payload_type)?;
    record.key = fields.key;
    record.routing_key = fields.routing_key;
    record.headers = fields.headers.map(|headers| headers.get().to_owned());
    Ok(Line::Message(Box::new(record)))
}

impl Fields<'_> {
    fn take_payload(&mut self, payload_type: PayloadType) -> Result<Option<Vec<u8>>, String> {
        let payload = self.payload.map(RawValue::get);
        let given = [payload.is_some(), self.payload_text.is_some(), self.payload_base64.is_some()];
        match given.into_iter().filter(|given| *given).count() {
            0 if self.tombstone => return Ok(None),
            0 => return Err("it has no \"payload\"".to_owned()),
            1 => {}
            _ => return Err("it has more than one payload".to_owned()),
        }
        if self.tombstone {
            return match payload {
                Some("null") => Ok(None),
                _ => Err("it is a tombstone and has a payload".to_owned()),
            };
        }
        if let Some(text) = &self.payload_base64 {
            let bytes = base64::decode(text.as_bytes());
            return bytes.map(Some).ok_or_else(|| "\"payload_base64\" is no base64".to_owned());
        }
        if let Some(text) = self.payload_text.take() {
            return Ok(Some(text.into_bytes()));
        }
        let payload = payload.unwrap_or_default();
        if matches!(payload_type, PayloadType::Json | PayloadType::Jsonb) {
            return Ok(Some(payload.as_bytes().to_vec()));
        }
        let text: String = serde_json::from_str(payload).map_err(|_| {
            format!("\"payload\" is no string, and the stream stores {payload_type}")
        })?;
        if payload_type != PayloadType::Bytea {
            return Ok(Some(text.into_bytes()));
        }
        // As consume prints them.
        let hex = text.strip_prefix("\\x").and_then(unhex);
        hex.map(Some).ok_or_else(|| {
            "\"payload\" is not written as \\x00ff, and the stream stores bytea".to_owned()
        })
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let value = |digit: u8| char::from(digit).to_digit(16).map(|d| d as u8);
    digits
        .len()
        .is_multiple_of(2)
        .then(|| {
            digits.chunks(2).map(|pair| Some(value(pair[0])? << 4 | value(pair[1])?)).collect()
        })
        .flatten()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use proptest::prelude::*;

    use super::*;

    fn read(line: &str, payload_type: PayloadType) -> Result<Record<Vec<u8>>, String> {
        match parse(line.as_bytes(), payload_type)? {
            Line::Message(record) => Ok(*record),
            other => panic!("{other:?}"),
        }
    }

    fn payload(value: &str, payload_type: PayloadType) -> Result<Option<Vec<u8>>, String> {
        let line = format!("{{\"id\":1,\"produced_at\":\"2026-03-01T12:00:00Z\",{value}}}");
        read(&line, payload_type).map(|record| record.payload)
    }

    #[test]
    fn what_consume_prints_can_be_read() {
        let line = r#"{"attempt":1,"headers":{},"id":7,"key":null,"produced_at":"2026-03-01T12:00:00.000000Z","routing_key":"a.b","tombstone":false,"payload":{"n": 1e400}}"#;
        let record = read(line, PayloadType::Json).unwrap();
        assert_eq!((record.id, record.routing_key.as_deref()), (7, Some("a.b")));
        assert_eq!(record.payload.as_deref(), Some(&b"{\"n\": 1e400}"[..]));
        assert_eq!(payload(r#""payload":"\\x00fF""#, PayloadType::Bytea), Ok(Some(vec![0, 255])));
        assert_eq!(payload(r#""payload":"a\n""#, PayloadType::Text), Ok(Some(b"a\n".to_vec())));
        assert_eq!(payload(r#""payload":null"#, PayloadType::Json), Ok(Some(b"null".to_vec())));
        assert_eq!(payload(r#""tombstone":true,"payload":null"#, PayloadType::Json), Ok(None));
        assert_eq!(payload(r#""tombstone":true"#, PayloadType::Text), Ok(None));
    }

    #[test]
    fn what_cannot_be_read_is_told() {
        for (value, payload_type, said) in [
            (r#""payload":null"#, PayloadType::Text, "no string"),
            (r#""payload":1"#, PayloadType::Bytea, "no string"),
            (r#""payload":"abc""#, PayloadType::Bytea, "\\x00ff"),
            (r#""payload":"\\x0""#, PayloadType::Bytea, "\\x00ff"),
            (r#""payload_base64":"Zh==""#, PayloadType::Bytea, "no base64"),
            (r#""payload":1,"payload_text":"1""#, PayloadType::Json, "more than one"),
            (r#""tombstone":true,"payload":1"#, PayloadType::Json, "tombstone"),
            (r#""paylod":1"#, PayloadType::Json, "unknown field `paylod`"),
            (r#""payload":1,"expires_at":"soon""#, PayloadType::Json, "no time"),
            (r#""key":"x""#, PayloadType::Json, "no \"payload\""),
        ] {
            let error = payload(value, payload_type).unwrap_err();
            assert!(error.contains(said), "{value}: {error}");
        }
        for (line, said) in [
            ("{\"id\":1,\"payload\":1}", "no \"produced_at\""),
            ("{\"produced_at\":\"2026-03-01T12:00:00Z\",\"payload\":1}", "no \"id\""),
            ("{\"id\":1", "EOF while parsing an object (column 7)"),
            ("[]", "column"),
        ] {
            let error = read(line, PayloadType::Json).unwrap_err();
            assert!(error.contains(said), "{line}: {error}");
        }
        assert!(parse(b"\xff", PayloadType::Json).unwrap_err().contains("UTF-8"));
    }

    #[test]
    fn first_and_last_lines_are_told_from_messages() {
        let about = About {
            format: 1,
            stream: "s".to_owned(),
            payload_type: "json".to_owned(),
            compacted: false,
            partition_size: 1000,
            after: 0,
            upto: 9,
        };
        let (mut first, mut last) = (Vec::new(), Vec::new());
        write_about(&mut first, &about);
        let end = End { messages: 3, upto: 9 };
        write_end(&mut last, end);
        assert_eq!(parse(&first, PayloadType::Json), Ok(Line::About(about)));
        assert_eq!(parse(&last, PayloadType::Json), Ok(Line::End(end)));
    }

    fn any_payload(payload_type: PayloadType) -> BoxedStrategy<Vec<u8>> {
        match payload_type {
            PayloadType::Bytea => proptest::collection::vec(any::<u8>(), 0..100).boxed(),
            PayloadType::Text => any::<String>().prop_map(String::into_bytes).boxed(),
            _ => (
                "[ \t\r\n]{0,2}",
                any::<String>(),
                "[ \t\r\n]{0,2}",
                -9e300_f64..9e300,
                "[ \t\r\n]{0,2}",
            )
                .prop_map(|(before, text, between, number, after)| {
                    let text = serde_json::to_string(&text).unwrap_or_default();
                    format!("{before}[{text},{between}{number:e}000]{after}").into_bytes()
                })
                .boxed(),
        }
    }

    proptest! {
        #[test]
        fn a_line_is_a_message_and_nothing_is_lost(
            id in 1_i64.., key in any::<Option<String>>(), routing_key in any::<Option<String>>(), header in any::<Option<String>>(),
            // From the first year of PostgreSQL's calendar to the last.
            produced_at in -210_000_000_000_000_000_i64..9_200_000_000_000_000_000, expires in any::<Option<u32>>(), tombstone in any::<bool>(),
            (payload_type, payload) in prop_oneof![Just(PayloadType::Json), Just(PayloadType::Jsonb), Just(PayloadType::Text), Just(PayloadType::Bytea)]
                .prop_flat_map(|t| (Just(t), any_payload(t))),
        ) {
            let offset = Duration::from_micros(produced_at.unsigned_abs());
            let at = match produced_at {
                _ if produced_at % 7 == 0 => calendar::infinity(),
                _ if produced_at % 7 == 1 => calendar::before_all(),
                0.. => SystemTime::UNIX_EPOCH + offset,
                _ => SystemTime::UNIX_EPOCH - offset,
            };
            let mut record = Record::new(id, at, Some(payload).filter(|_| !tombstone));
            record.key = key;
            record.routing_key = routing_key;
            record.headers = header.map(|h| format!("{{\"h\": {}, \"n\": 1.10}}", serde_json::to_string(&h).unwrap_or_default()));
            record.expires_at = expires.map(|us| match us % 5 {
                0 => calendar::infinity(),
                1 => calendar::before_all(),
                _ => SystemTime::UNIX_EPOCH + Duration::from_micros(u64::from(us)),
            });
            let mut line = Vec::new();
            write(&mut line, &record, payload_type);
            prop_assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
            prop_assert_eq!(parse(&line, payload_type), Ok(Line::Message(Box::new(record))));
        }
    }
}
