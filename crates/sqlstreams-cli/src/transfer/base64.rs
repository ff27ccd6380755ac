//! Bytes as text: base64 with padding, as RFC 4648 has it.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Appends the text of these bytes.
pub(super) fn encode(bytes: &[u8], text: &mut Vec<u8>) {
    text.reserve(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or_default());
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            text.push(match place <= chunk.len() {
                true => DIGITS[(bits >> (18 - 6 * place) & 63) as usize],
                false => b'=',
            });
        }
    }
}

/// The bytes of such a text; nothing if it is none.
pub(super) fn decode(text: &[u8]) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let padding = text.iter().rev().take_while(|b| **b == b'=').count();
    if padding > 2 {
        return None;
    }
    let digits = &text[..text.len() - padding];
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for chunk in digits.chunks(4) {
        let mut bits = 0;
        for digit in chunk {
            bits = bits << 6 | value(*digit)?;
        }
        bits <<= 6 * (4 - chunk.len());
        let whole = chunk.len() * 6 / 8;
        let all = bits.to_be_bytes();
        // What is beyond the last byte has to be nothing, so that each text stands for one value.
        if all[1 + whole..].iter().any(|b| *b != 0) {
            return None;
        }
        bytes.extend_from_slice(&all[1..1 + whole]);
    }
    Some(bytes)
}

fn value(digit: u8) -> Option<u32> {
    Some(u32::from(match digit {
        b'A'..=b'Z' => digit - b'A',
        b'a'..=b'z' => digit - b'a' + 26,
        b'0'..=b'9' => digit - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_one_text() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"foob", "Zm9vYg=="),
            (b"\x00\xff\xfe", "AP/+"),
        ] {
            let mut out = Vec::new();
            encode(bytes, &mut out);
            assert_eq!(out, text.as_bytes());
            assert_eq!(decode(text.as_bytes()).as_deref(), Some(bytes), "{text}");
        }
        for wrong in ["Zg=", "Zh==", "Zg", "====", "Z===", "Zm9*", "Zm9=", "=Zg=", "Zg==Zg=="] {
            assert_eq!(decode(wrong.as_bytes()), None, "{wrong}");
        }
        let all: Vec<u8> = (0..=255).collect();
        for from in 0..256 {
            let mut out = Vec::new();
            encode(&all[from..], &mut out);
            assert_eq!(decode(&out).as_deref(), Some(&all[from..]));
        }
    }
}
