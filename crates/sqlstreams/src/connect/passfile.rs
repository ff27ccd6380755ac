//! Passwords from `.pgpass`.

use std::fs;
use std::path::Path;

/// The lines of a password file, already found to be private enough to be used.
pub(super) struct Passfile {
    text: String,
}

impl Passfile {
    /// Reads a password file; `None` when it doesn't exist, can't be read or is too open.
    ///
    /// Like libpq, this never fails: the server may well accept the connection without a password.
    pub(super) fn read(path: &Path) -> Option<Self> {
        // A missing file is the usual case.
        let metadata = fs::metadata(path).ok()?;
        if !metadata.is_file() {
            tracing::warn!(path = %path.display(), "ignored the password file: it is no plain file");
            return None;
        }
        if is_too_open(&metadata) {
            tracing::warn!(
                path = %path.display(),
                "ignored the password file: others may read it; set its permissions to 0600",
            );
            return None;
        }
        match fs::read(path) {
            Ok(bytes) => Some(Self { text: String::from_utf8_lossy(&bytes).into_owned() }),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "ignored the password file");
                None
            }
        }
    }

    /// The password of the first line that matches.
    pub(super) fn password(
        &self,
        host: &str,
        port: u16,
        database: &str,
        user: &str,
    ) -> Option<String> {
        let wanted = [host, &port.to_string(), database, user];
        self.text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
            let mut fields = Fields(line);
            let matches = wanted.iter().all(|value| {
                fields.next().is_some_and(|field| field == "*" || unescape(field) == *value)
            });
            if matches { fields.next().map(unescape) } else { None }
        })
    }
}

/// The fields of a line, still escaped, between colons that aren't.
struct Fields<'a>(&'a str);

impl<'a> Iterator for Fields<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.0.is_empty() {
            return None;
        }
        let mut escaped = false;
        let end = self.0.find(|c| {
            let ends = c == ':' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let (field, rest) = match end {
            Some(end) => (&self.0[..end], &self.0[end + 1..]),
            None => (self.0, ""),
        };
        self.0 = rest;
        Some(field)
    }
}

fn unescape(field: &str) -> String {
    let mut text = String::with_capacity(field.len());
    let mut chars = field.chars();
    while let Some(next) = chars.next() {
        match next {
            '\\' => text.extend(chars.next()),
            next => text.push(next),
        }
    }
    text
}

#[cfg(unix)]
fn is_too_open(metadata: &fs::Metadata) -> bool {
    use std::os::unix::fs::PermissionsExt;
    metadata.permissions().mode() & 0o077 != 0
}

#[cfg(not(unix))]
fn is_too_open(_: &fs::Metadata) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passfile(text: &str) -> Passfile {
        Passfile { text: text.to_owned() }
    }

    #[test]
    fn the_first_matching_line_counts() {
        let file = passfile(
            "# host:port:database:user:password\n\
             db:5432:app:alice:one\r\n\
             db:*:*:alice:two\n\
             *:*:*:*:any\n",
        );
        let password = |host, port, user| file.password(host, port, "app", user);
        assert_eq!(password("db", 5432, "alice").as_deref(), Some("one"));
        assert_eq!(password("db", 5433, "alice").as_deref(), Some("two"));
        assert_eq!(password("other", 5432, "bob").as_deref(), Some("any"));
    }

    #[test]
    fn escapes() {
        let file = passfile(r"\:\:1:5432:a\\b:\*:p\:w\\:trailing");
        assert_eq!(file.password("::1", 5432, r"a\b", "*").as_deref(), Some(r"p:w\"));
        assert_eq!(file.password("::1", 5432, r"a\b", "x"), None);
    }

    #[test]
    fn malformed_lines_match_nothing() {
        for text in ["", ":", "::::", "db", "db:5432:app:alice", "\\", "db:5432:app\\:alice:pw"] {
            assert_eq!(passfile(text).password("db", 5432, "app", "alice"), None, "{text}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn an_open_file_is_ignored() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("sqlstreams-pgpass-{}", std::process::id()));
        fs::write(&path, "*:*:*:*:pw").unwrap();
        for (mode, readable) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(Passfile::read(&path).is_some(), readable, "{mode:o}");
        }
        fs::remove_file(&path).unwrap();
        assert!(Passfile::read(&path).is_none());
        assert!(Passfile::read(&std::env::temp_dir()).is_none());
    }
}
