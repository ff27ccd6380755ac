//! The server settings a private cluster starts with.

use std::fs;
use std::path::Path;

use crate::error::{Context, Error, Result};
use crate::user::ServerUser;

/// The file in the data folder that holds them; `postgresql.conf` includes it.
const FILE: &str = "sqlstreams.conf";

/// Suited to a small machine with several clusters on it.
const DEFAULTS: &[(&str, &str)] = &[
    ("listen_addresses", "127.0.0.1"),
    // Nothing but TCP, as a socket's path may be too long for the system.
    ("unix_socket_directories", ""),
    ("max_connections", "200"),
    ("shared_buffers", "256MB"),
    ("max_prepared_transactions", "64"),
    ("max_wal_size", "2GB"),
    ("timezone", "UTC"),
    ("log_timezone", "UTC"),
    ("lc_messages", "C"),
    ("log_line_prefix", "%m [%p] "),
    ("logging_collector", "off"),
    ("log_destination", "stderr"),
    ("fsync", "on"),
    ("synchronous_commit", "on"),
    ("full_page_writes", "on"),
];

/// Settings that trade survival of a machine's crash for speed.
const NOT_DURABLE: &[(&str, &str)] =
    &[("fsync", "off"), ("synchronous_commit", "off"), ("full_page_writes", "off")];

/// Settings in the order given; a later one wins.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) not_durable: bool,
    pub(crate) extra: Vec<(String, String)>,
}

impl Settings {
    /// For a cluster whose folder goes with it.
    pub(crate) fn throw_away() -> Self {
        // Else a killed server would leave shared memory in /dev/shm for good.
        let inside = ("dynamic_shared_memory_type".to_owned(), "mmap".to_owned());
        Self { not_durable: false, extra: vec![inside] }
    }

    /// Checks names and values before anything is started.
    pub(crate) fn check(&self) -> Result<()> {
        for (name, value) in &self.extra {
            let bad = |why| Error::BadSetting { name: name.clone(), why };
            let fit = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
            if name.is_empty() || !name.chars().all(fit) {
                return Err(bad("a name has letters, digits, `_` and `.` only"));
            }
            if name.eq_ignore_ascii_case("port") {
                return Err(bad("the port is chosen when the server starts"));
            }
            if value.contains(['\n', '\r', '\0']) {
                return Err(bad("a value is one line"));
            }
        }
        Ok(())
    }

    /// Writes the settings into a data folder.
    pub(crate) fn write(&self, data_dir: &Path, user: &ServerUser) -> Result<()> {
        let file = data_dir.join(FILE);
        fs::write(&file, self.render()).doing(|| format!("write {}", file.display()))?;
        user.own(&file)
    }

    fn render(&self) -> String {
        let mut text = String::from("# Written by sqlstreams before each start.\n");
        let chosen = DEFAULTS
            .iter()
            .chain(NOT_DURABLE.iter().filter(|_| self.not_durable))
            .copied()
            .chain(self.extra.iter().map(|(k, v)| (k.as_str(), v.as_str())));
        for (name, value) in chosen {
            let value = value.replace('\\', "\\\\").replace('\'', "''");
            text.push_str(&format!("{name} = '{value}'\n"));
        }
        text
    }
}

/// Makes a fresh data folder's `postgresql.conf` include the settings file.
pub(crate) fn include(data_dir: &Path) -> Result<()> {
    let file = data_dir.join("postgresql.conf");
    let doing = || format!("extend {}", file.display());
    let mut text = fs::read_to_string(&file).doing(doing)?;
    text.push_str(&format!("\ninclude_if_exists = '{FILE}'\n"));
    // Written in place: the file keeps its owner and mode.
    fs::write(&file, text).doing(doing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Settings {
        Settings { not_durable: false, extra: vec![(name.to_owned(), value.to_owned())] }
    }

    #[test]
    fn quotes_values() {
        let text = with("a.b", r"it's C:\x").render();
        assert!(text.ends_with("a.b = 'it''s C:\\\\x'\n"), "{text}");
    }

    #[test]
    fn what_is_given_comes_last() {
        let settings = Settings { not_durable: true, ..with("fsync", "on") };
        let text = settings.render();
        assert!(text.rfind("fsync = 'on'") > text.rfind("fsync = 'off'"));
    }

    #[test]
    fn refuses_what_could_break_out_of_its_line() {
        assert!(with("a", "1\nb = 2").check().is_err());
        assert!(with("a = 1\nb", "2").check().is_err());
        assert!(with("port", "5432").check().is_err());
        assert!(with("work_mem", "64MB").check().is_ok());
    }
}
