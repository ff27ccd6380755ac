//! The `postgres://user:password@host:port/database?option=value` form.

use super::error::DsnError;
use super::settings::Settings;

/// The text behind `postgres://` or `postgresql://`, if this is such a URL.
pub(super) fn strip_scheme(text: &str) -> Option<&str> {
    text.strip_prefix("postgres://").or_else(|| text.strip_prefix("postgresql://"))
}

/// Reads the options of a URL whose scheme has been taken off.
///
/// The grammar is libpq's, not that of RFC 3986: several hosts, everything optional, a user part
/// that ends at the first `@`, no fragment.
pub(super) fn parse(text: &str) -> Result<Settings, DsnError> {
    let before_path = text.split('/').next().unwrap_or_default();
    let (user_info, rest) = match before_path.find('@') {
        Some(at) => (Some(&text[..at]), &text[at + 1..]),
        None => (None, text),
    };

    // A raw @ further on most likely ends a password that has raw separators in it. Then what
    // looks like a host, a port or an option is a piece of the password, and must not be shown.
    parse_parts(user_info, rest).map_err(|error| match rest.contains('@') {
        true => DsnError::new(RAW_SEPARATOR),
        false => error,
    })
}

fn parse_parts(user_info: Option<&str>, rest: &str) -> Result<Settings, DsnError> {
    let mut settings = Settings::default();
    let mut set = |name: &str, value: &str| match value {
        // In a URL an empty part is one left out.
        "" => Ok(()),
        value => settings.set(name, decode(value)?),
    };

    if let Some(user_info) = user_info {
        let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
        set("user", user)?;
        set("password", password)?;
    }

    let (location, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (hosts, database) = location.split_once('/').unwrap_or((location, ""));
    // libpq would take the latter for a database; here it would go to the logs, if it is the rest
    // of a password.
    if hosts.contains('@') || database.contains('@') {
        return Err(DsnError::new(RAW_SEPARATOR));
    }
    let (hosts, ports) = split_hosts(hosts)?;
    set("host", &hosts)?;
    set("port", &ports)?;
    set("dbname", database)?;

    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let Some((name, value)) = pair.split_once('=') else {
            return Err(DsnError::new(
                "an option behind the ? of the connection URL has no value; write option=value",
            ));
        };
        match (decode(name)?.as_str(), decode(value)?) {
            // What JDBC writes, and libpq accepts.
            ("ssl", value) if value == "true" => settings.set("sslmode", "require".to_owned())?,
            (name, value) => settings.set(name, value)?,
        }
    }
    Ok(settings)
}

/// Separates `a:1,b,[::1]:3` into `a,b,::1` and `1,,3`.
fn split_hosts(text: &str) -> Result<(String, String), DsnError> {
    let mut hosts = Vec::new();
    let mut ports = Vec::new();
    for element in text.split(',') {
        let (host, port) = match element.strip_prefix('[') {
            Some(bracketed) => {
                let Some((address, after)) = bracketed.split_once(']') else {
                    return Err(DsnError::new(
                        "an IPv6 address in the connection URL lacks its closing ]",
                    ));
                };
                match (address, after.strip_prefix(':')) {
                    ("", _) => {
                        return Err(DsnError::new(
                            "an IPv6 address in the connection URL is empty",
                        ));
                    }
                    (_, Some(port)) => (address, port),
                    (_, None) if after.is_empty() => (address, ""),
                    (_, None) => {
                        return Err(DsnError::new(
                            "only a colon and a port may follow the ] of an IPv6 address in the \
                             connection URL",
                        ));
                    }
                }
            }
            None => element.split_once(':').unwrap_or((element, "")),
        };
        hosts.push(host);
        ports.push(port);
    }
    // One port goes for all hosts, an empty one is the default: so nothing but commas is nothing.
    let ports = match ports.iter().all(|port| port.is_empty()) {
        true => String::new(),
        false => ports.join(","),
    };
    Ok((hosts.join(","), ports))
}

/// Replaces each `%XX`.
fn decode(text: &str) -> Result<String, DsnError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        match (rest.next().and_then(hex_digit), rest.next().and_then(hex_digit)) {
            (Some(high), Some(low)) => bytes.push(high << 4 | low),
            _ => {
                return Err(DsnError::new(
                    "a % in the connection URL isn't followed by two hexadecimal digits; write a \
                     percent sign itself as %25",
                ));
            }
        }
    }
    String::from_utf8(bytes).map_err(|_| {
        DsnError::new("the connection URL isn't UTF-8 after its percent escapes are decoded")
    })
}

fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

const RAW_SEPARATOR: &str = "the connection URL can't be taken apart; if the password contains any \
                             of / @ : ? # % they have to be written as %2F %40 %3A %3F %23 %25";

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Settings {
        parse(text).unwrap()
    }

    #[test]
    fn every_part() {
        let all =
            settings("us%40er:p%2Fw%25@db.example:6432/my%20db?sslmode=require&options=-c%20a=b");
        assert_eq!(all.get("user"), Some("us@er"));
        assert_eq!(all.get("password"), Some("p/w%"));
        assert_eq!(all.get("host"), Some("db.example"));
        assert_eq!(all.get("port"), Some("6432"));
        assert_eq!(all.get("dbname"), Some("my db"));
        assert_eq!(all.get("sslmode"), Some("require"));
        assert_eq!(all.get("options"), Some("-c a=b"));
    }

    #[test]
    fn every_part_may_be_missing() {
        for text in ["", "/", "?", "@", ":@", "/?", "?&", ":"] {
            let none = settings(text);
            for name in ["user", "password", "host", "port", "dbname"] {
                assert_eq!(none.get(name), None, "{name} of {text:?}");
            }
        }
    }

    #[test]
    fn hosts() {
        let several = settings("a:1,b,[fe80::1]:3,%2Ftmp/db");
        assert_eq!(several.get("host"), Some("a,b,fe80::1,/tmp"));
        assert_eq!(several.get("port"), Some("1,,3,"));
        assert_eq!(settings("[::1]").get("host"), Some("::1"));
        assert_eq!(settings("a,b/db").get("port"), None);
        assert_eq!(settings("a/db?host=b").get("host"), Some("b"), "the last wins");
    }

    #[test]
    fn jdbc_spelling_of_tls() {
        assert_eq!(settings("a/db?ssl=true").get("sslmode"), Some("require"));
        assert!(parse("a/db?ssl=maybe").is_err());
    }

    #[test]
    fn malformed() {
        for text in [
            "[::1",
            "[]",
            "[::1]x",
            "%",
            "%4",
            "%zz",
            "%é",
            "a/%ff",
            "a/d?x",
            "a/d?nosuch=1",
            "u:p@ss@host/db",
            "u:p@s/s@host/db",
            "u@h/db?=1",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn messages_keep_a_raw_password_to_themselves() {
        for text in [
            "u:x/secret@host/db?a=b",
            "u:x@secret@host",
            "u:[secret/x@host",
            "u:x/y?secret@host/db",
            "u:x/y?secret=1@host/db",
        ] {
            let message = parse(text).err().unwrap().to_string();
            assert!(!message.contains("secret"), "{message}");
        }
    }

    #[test]
    fn an_unknown_option_is_named() {
        let message = parse("u:p@h/db?pgbouncer=true").err().unwrap().to_string();
        assert!(message.contains("`pgbouncer`"), "{message}");
    }
}
