//! The `host=localhost dbname='my db'` form.

use std::iter::Peekable;
use std::str::Chars;

use super::error::DsnError;
use super::settings::Settings;

/// Reads the options of a string in key=value form.
///
/// No message repeats text from the string but option names: a password with a space that lacks
/// its quotes continues where the next option is expected.
pub(super) fn parse(text: &str) -> Result<Settings, DsnError> {
    let mut settings = Settings::default();
    let mut after_password = false;
    let mut chars = text.chars().peekable();
    loop {
        skip_spaces(&mut chars);
        if chars.peek().is_none() {
            return Ok(settings);
        }
        let name = name(&mut chars)?;
        let value = value(&mut chars)?;
        settings.set(&name, value).map_err(|error| match after_password {
            true => DsnError::new(
                "there is no known option after the password; a password with spaces needs \
                 single quotes, as in password='two words'",
            ),
            false => error,
        })?;
        after_password = name == "password";
    }
}

fn name(chars: &mut Peekable<Chars<'_>>) -> Result<String, DsnError> {
    let mut name = String::new();
    while let Some(&next) = chars.peek() {
        if next == '=' || next.is_whitespace() {
            break;
        }
        name.push(next);
        chars.next();
    }
    skip_spaces(chars);
    match chars.next() {
        Some('=') if !name.is_empty() => Ok(name),
        Some('=') => {
            Err(DsnError::new("the connection string has a value without a name before ="))
        }
        _ => Err(DsnError::new(
            "the connection string has a word without a value; it has to be a URL such as \
             postgres://user@host/database or pairs such as host=localhost dbname='my db', with \
             single quotes around values that contain spaces",
        )),
    }
}

fn value(chars: &mut Peekable<Chars<'_>>) -> Result<String, DsnError> {
    skip_spaces(chars);
    let quoted = chars.next_if_eq(&'\'').is_some();
    let mut value = String::new();
    loop {
        match chars.peek() {
            None if quoted => {
                return Err(DsnError::new("a single quote in the connection string isn't closed"));
            }
            None => return Ok(value),
            Some('\'') if quoted => {
                chars.next();
                return Ok(value);
            }
            Some(next) if !quoted && next.is_whitespace() => return Ok(value),
            Some('\\') => {
                chars.next();
                // At the very end a backslash stands for nothing, as in libpq.
                value.extend(chars.next());
            }
            Some(&next) => {
                value.push(next);
                chars.next();
            }
        }
    }
}

fn skip_spaces(chars: &mut Peekable<Chars<'_>>) {
    while chars.next_if(|next| next.is_whitespace()).is_some() {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_escapes_and_spaces() {
        let settings = parse(
            r"  host = db  password = 'it\'s a \\ secret'dbname=a\ b user='' application_name=é ",
        )
        .unwrap();
        assert_eq!(settings.get("host"), Some("db"));
        assert_eq!(settings.get("password"), Some(r"it's a \ secret"));
        assert_eq!(settings.get("dbname"), Some("a b"));
        assert_eq!(settings.get("user"), None);
        assert_eq!(settings.get("application_name"), Some("é"));
    }

    #[test]
    fn the_last_of_several_wins() {
        assert_eq!(parse("host=a host=b").unwrap().get("host"), Some("b"));
    }

    #[test]
    fn malformed() {
        for text in ["host", "=x", "host=a b", "host='a", r"host='a\", "host='a' '", "nosuch=1"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn messages_keep_an_unquoted_password_to_themselves() {
        for text in ["password=my secret", "password=my secret=x", "password='my secret"] {
            let message = parse(text).err().unwrap().to_string();
            assert!(!message.contains("secret"), "{message}");
        }
    }
}
