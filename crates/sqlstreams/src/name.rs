//! Names of streams, groups and schemas.

use crate::error::{Error, ErrorKind, Result};

/// The longest name of a stream or group, in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 200;

/// Refuses what cannot be a name: `what` is "stream" or "group".
pub(crate) fn check_name(what: &str, name: &str) -> Result<()> {
    let problem = if name.is_empty() {
        "is empty".to_owned()
    } else if name.len() > MAX_NAME_BYTES {
        format!("has {} bytes, more than {MAX_NAME_BYTES}", name.len())
    } else if name.contains('\0') {
        "holds a NUL character".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidName, format!("the {what} name {} {problem}", shorten(name)))
        .with_hint(format!(
            "A {what} name is any text of 1 to {MAX_NAME_BYTES} bytes without NUL."
        )))
}

/// A name as it may stand in a message: quoted, cut after 60 characters.
pub(crate) fn shorten(name: &str) -> String {
    match name.char_indices().nth(60) {
        Some((end, _)) => format!("{:?}…", &name[..end]),
        None => format!("{name:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_is_counted_in_bytes() {
        assert!(check_name("stream", &"é".repeat(100)).is_ok());
        let error = check_name("stream", &"é".repeat(101)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidName);
        assert!(error.to_string().contains("202 bytes"), "{error}");
    }

    #[test]
    fn empty_and_nul_are_refused_and_punctuation_is_not() {
        assert!(check_name("group", "").is_err());
        assert!(check_name("group", "a\0b").is_err());
        assert!(check_name("group", r#"'; DROP TABLE "x"; -- 🦀 %s {}"#).is_ok());
    }
}
