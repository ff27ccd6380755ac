//! What the process's surroundings contribute to a connection string.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The variables and places libpq takes defaults from.
///
/// A value rather than calls to `std::env` in place, so that the rules can be tested: changing the
/// environment of a running process is unsafe.
#[derive(Debug, Default)]
pub(super) struct Environment {
    variables: BTreeMap<String, String>,
    /// Directories to look for the server's Unix socket in, best first.
    socket_dirs: Vec<PathBuf>,
}

impl Environment {
    pub(super) fn of_process() -> Self {
        let wanted =
            |name: &str| name.starts_with("PG") || USER_NAMES.contains(&name) || name == HOME;
        // A variable that isn't UTF-8 can't be sent to the server either, so it counts as unset.
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| wanted(name))
            .collect();
        let socket_dirs = if cfg!(unix) {
            // libpq is built with one of the two: distributions with the first, upstream with
            // the second.
            vec![PathBuf::from("/var/run/postgresql"), PathBuf::from("/tmp")]
        } else {
            Vec::new()
        };
        Self { variables, socket_dirs }
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    /// The name of the user that runs this process, if it is known.
    pub(super) fn user(&self) -> Option<&str> {
        USER_NAMES.iter().find_map(|name| self.get(name).filter(|value| !value.is_empty()))
    }

    /// `~/.pgpass`, whether it exists or not.
    pub(super) fn default_passfile(&self) -> Option<PathBuf> {
        self.home().map(|home| home.join(".pgpass"))
    }

    /// `~/.postgresql/root.crt`, if it exists.
    pub(super) fn default_root_cert(&self) -> Option<PathBuf> {
        self.home().map(|home| home.join(".postgresql/root.crt")).filter(|path| path.exists())
    }

    /// The directory in which a server listens on `port`.
    pub(super) fn socket_dir(&self, port: u16) -> Option<&Path> {
        let name = format!(".s.PGSQL.{port}");
        self.socket_dirs.iter().map(PathBuf::as_path).find(|dir| dir.join(&name).exists())
    }

    /// Whether `.pgpass` calls this directory `localhost`.
    pub(super) fn is_default_socket_dir(&self, dir: &str) -> bool {
        self.socket_dirs.iter().any(|known| known == Path::new(dir))
    }

    fn home(&self) -> Option<&Path> {
        self.get(HOME).filter(|home| !home.is_empty()).map(Path::new)
    }
}

#[cfg(test)]
impl Environment {
    pub(super) fn with(mut self, name: &str, value: &str) -> Self {
        self.variables.insert(name.to_owned(), value.to_owned());
        self
    }

    pub(super) fn with_socket_dir(mut self, dir: &Path) -> Self {
        self.socket_dirs.push(dir.to_owned());
        self
    }
}

const HOME: &str = if cfg!(windows) { "USERPROFILE" } else { "HOME" };

const USER_NAMES: &[&str] = &["USER", "LOGNAME", "USERNAME"];
