//! Payloads as JSON values and as text.

use std::fmt::Write;

use serde_json::Value;
use sqlstreams::PayloadType;

/// A payload within a JSON document: JSON as it is, text as a string, bytes as PostgreSQL writes them (`\x00ff`).
pub(crate) fn to_value(payload: &[u8], payload_type: PayloadType) -> Value {
    match payload_type {
        PayloadType::Json | PayloadType::Jsonb => serde_json::from_slice(payload)
            // A number that no f64 holds, or nesting too deep for us.
            .unwrap_or_else(|_| String::from_utf8_lossy(payload).into()),
        PayloadType::Text => String::from_utf8_lossy(payload).into(),
        _ => hex(payload).into(),
    }
}

/// A payload for reading: bytes that are no text come as PostgreSQL writes them.
pub(crate) fn to_text(payload: &[u8], payload_type: PayloadType) -> String {
    match (payload_type, std::str::from_utf8(payload)) {
        (PayloadType::Bytea, Err(_)) => hex(payload),
        (_, Ok(text)) => text.to_owned(),
        (_, Err(_)) => String::from_utf8_lossy(payload).into_owned(),
    }
}

/// Appends a payload to a line of JSON, in the same form as [`to_value`] but without changing how numbers are spelled.
pub(crate) fn write_json(line: &mut Vec<u8>, payload: &[u8], payload_type: PayloadType) {
    match payload_type {
        PayloadType::Json | PayloadType::Jsonb => {
            // Line breaks can only stand between the tokens of JSON, where a blank does as well.
            line.extend(payload.iter().map(|b| if matches!(b, b'\n' | b'\r') { b' ' } else { *b }));
        }
        _ => line.extend_from_slice(to_value(payload, payload_type).to_string().as_bytes()),
    }
}

fn hex(payload: &[u8]) -> String {
    let mut text = String::with_capacity(2 + payload.len() * 2);
    text.push_str("\\x");
    for byte in payload {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_stays_on_one_line_with_its_numbers() {
        let mut line = Vec::new();
        write_json(&mut line, b"{\n\"n\": 12345678901234567890.10\r\n}", PayloadType::Json);
        assert_eq!(line, b"{ \"n\": 12345678901234567890.10  }");
    }

    #[test]
    fn bytes_look_as_in_postgresql() {
        assert_eq!(to_value(b"\0\xff", PayloadType::Bytea), "\\x00ff");
        assert_eq!(to_text(b"plain", PayloadType::Bytea), "plain");
    }
}
