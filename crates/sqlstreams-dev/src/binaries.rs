//! Finds PostgreSQL's server programs on this machine.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf, absolute};
use std::process::{Command, Stdio};

use crate::error::{Context, Error, Result};
use crate::obtain::{LATEST, cached, how_to_install, obtain};
use crate::user::ServerUser;

/// The environment variable that names the folder with the server programs.
pub const PG_BIN_VARIABLE: &str = "SQLSTREAMS_PG_BIN";

/// The major versions of PostgreSQL this crate runs.
pub const SUPPORTED_MAJORS: std::ops::RangeInclusive<u32> = 15..=18;

/// A folder with PostgreSQL's server programs, known to run on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    folder: PathBuf,
    major: u32,
    version: String,
}

impl Programs {
    /// Takes the programs in a given folder.
    ///
    /// # Errors
    ///
    /// [`Error::UnusableFolder`] when the folder lacks `initdb` or `postgres`,
    /// or when these don't run here or aren't of version 15 to 18.
    pub fn in_folder(folder: impl AsRef<Path>) -> Result<Self> {
        Self::given(folder.as_ref(), "given as an option")
    }

    /// Looks for programs of one major version, or with `None` of any from 15 to 18.
    ///
    /// The places, in this order; the first that has them wins: the folder in
    /// `SQLSTREAMS_PG_BIN`, `pg_config --bindir`, the folders in `PATH`, then
    /// the highest version of each of `/usr/lib/postgresql/*/bin`,
    /// `/usr/pgsql-*/bin`, Homebrew and Postgres.app, and last what
    /// [`obtain`](crate::obtain()) downloaded before. Nothing is downloaded.
    /// When one version is asked for, folders with others are passed over.
    ///
    /// # Errors
    ///
    /// [`Error::NoPrograms`] when there are none; [`Error::UnusableFolder`]
    /// when `SQLSTREAMS_PG_BIN` is set to a folder that doesn't qualify;
    /// [`Error::UnsupportedMajor`].
    pub fn find(major: Option<u32>) -> Result<Self> {
        major.map_or(Ok(()), check_major)?;
        search(major)?.map_err(|looked| no_programs(major, looked))
    }

    /// Looks for programs as [`find`](Self::find) does, and downloads them
    /// with [`obtain`](crate::obtain()) when there are none.
    ///
    /// With `None` the latest version is downloaded. `progress` is called with
    /// a line of text before something slow.
    ///
    /// # Errors
    ///
    /// Those of [`find`](Self::find); the list in [`Error::NoPrograms`] then
    /// ends with why the download failed.
    pub fn find_or_obtain(major: Option<u32>, progress: &dyn Fn(&str)) -> Result<Self> {
        major.map_or(Ok(()), check_major)?;
        search(major)?.or_else(|mut looked| {
            obtain(major.unwrap_or(LATEST), progress).map_err(|error| {
                let why = match error {
                    Error::Obtain { why, .. } => why,
                    other => other.to_string(),
                };
                looked.push(format!("download: {why}"));
                no_programs(major, looked)
            })
        })
    }

    /// The folder that holds `initdb` and `postgres`.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The major version, 15 to 18.
    #[must_use]
    pub fn major(&self) -> u32 {
        self.major
    }

    /// The full version, such as `15.18`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The path of one program if the folder has it, such as `psql` or `pgbench`.
    ///
    /// Only `initdb` and `postgres` are sure to be there.
    #[must_use]
    pub fn tool(&self, name: &str) -> Option<PathBuf> {
        let path = self.folder.join(name);
        is_program(&path).then_some(path)
    }

    pub(crate) fn initdb(&self) -> PathBuf {
        self.folder.join("initdb")
    }

    pub(crate) fn postgres(&self) -> PathBuf {
        self.folder.join("postgres")
    }

    /// Examines a folder; the error is what it lacks.
    pub(crate) fn examine(folder: &Path) -> Result<Self, String> {
        let folder = absolute(folder).map_err(|error| error.to_string())?;
        if !folder.is_dir() {
            return Err("there is no such folder".to_owned());
        }
        for name in ["initdb", "postgres"] {
            if !is_program(&folder.join(name)) {
                return Err(format!("it has no program `{name}`"));
            }
        }
        let version = ask_version(&folder.join("postgres"))?;
        let major =
            major_of(&version).ok_or_else(|| format!("its version, `{version}`, can't be read"))?;
        if !SUPPORTED_MAJORS.contains(&major) {
            return Err(format!("it holds PostgreSQL {version}, not 15 to 18"));
        }
        Ok(Self { folder, major, version })
    }

    fn given(folder: &Path, origin: &'static str) -> Result<Self> {
        Self::examine(folder).map_err(|why| Error::UnusableFolder {
            folder: folder.to_path_buf(),
            origin,
            why,
        })
    }
}

/// Refuses a version outside the supported range.
pub(crate) fn check_major(major: u32) -> Result<()> {
    if SUPPORTED_MAJORS.contains(&major) { Ok(()) } else { Err(Error::UnsupportedMajor { major }) }
}

fn no_programs(major: Option<u32>, looked: Vec<String>) -> Error {
    Error::NoPrograms {
        wanted: major.map_or_else(|| "15 to 18".to_owned(), |major| major.to_string()),
        looked,
        fix: how_to_install(major),
    }
}

/// Finds a program by name in `PATH`.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?)
        .map(|folder| folder.join(name))
        .find(|path| is_program(path))
}

/// The first fit folder, or what was looked at.
fn search(wanted: Option<u32>) -> Result<Result<Programs, Vec<String>>> {
    let mut looked = Vec::new();
    if let Some(folder) = env::var_os(PG_BIN_VARIABLE).filter(|value| !value.is_empty()) {
        let programs = Programs::given(Path::new(&folder), "set by SQLSTREAMS_PG_BIN")?;
        if wanted.is_none_or(|major| major == programs.major) {
            return Ok(Ok(programs));
        }
        looked.push(format!("SQLSTREAMS_PG_BIN: PostgreSQL {}", programs.version));
    } else {
        looked.push("SQLSTREAMS_PG_BIN: not set".to_owned());
    }

    let mut try_folder = |origin: &str, folder: &Path| match Programs::examine(folder) {
        Ok(programs) if wanted.is_none_or(|major| major == programs.major) => Some(programs),
        Ok(programs) => {
            looked.push(format!("{origin}{}: PostgreSQL {}", folder.display(), programs.version));
            None
        }
        Err(why) => {
            looked.push(format!("{origin}{}: {why}", folder.display()));
            None
        }
    };

    let bindir = pg_config_bindir();
    if let Some(programs) = bindir.as_ref().and_then(|folder| try_folder("pg_config: ", folder)) {
        return Ok(Ok(programs));
    }
    // A folder of PATH without a server isn't worth a line of its own.
    let path = env::var_os("PATH").unwrap_or_default();
    let mut none_in_path = true;
    for folder in env::split_paths(&path).filter(|f| is_program(&f.join("postgres"))) {
        none_in_path = false;
        if let Some(programs) = try_folder("PATH: ", &folder) {
            return Ok(Ok(programs));
        }
    }
    for family in FAMILIES {
        for folder in family.folders() {
            if let Some(programs) = try_folder("", &folder) {
                return Ok(Ok(programs));
            }
        }
    }

    if let Some(programs) = cached(wanted.unwrap_or(LATEST), &mut looked) {
        return Ok(Ok(programs));
    }
    if bindir.is_none() {
        looked.push("pg_config: not on PATH, or without an answer".to_owned());
    }
    if none_in_path {
        looked.push("PATH: no `postgres` in it".to_owned());
    }
    let empty = FAMILIES.iter().filter(|family| family.folders().is_empty());
    looked.extend(empty.map(|family| format!("{}: nothing there", family.pattern())));
    Ok(Err(looked))
}

/// A place where a packager puts one folder per version.
struct Family {
    parent: &'static str,
    prefix: &'static str,
    bin: &'static str,
}

const FAMILIES: &[Family] = &[
    // Debian, Ubuntu and their kin.
    Family { parent: "/usr/lib/postgresql", prefix: "", bin: "bin" },
    // The RPM packages of the PostgreSQL project.
    Family { parent: "/usr", prefix: "pgsql-", bin: "bin" },
    // Homebrew on Apple silicon, then on Intel.
    #[cfg(target_os = "macos")]
    Family { parent: "/opt/homebrew/opt", prefix: "postgresql@", bin: "bin" },
    #[cfg(target_os = "macos")]
    Family { parent: "/usr/local/opt", prefix: "postgresql@", bin: "bin" },
    #[cfg(target_os = "macos")]
    Family { parent: "/Applications/Postgres.app/Contents/Versions", prefix: "", bin: "bin" },
];

impl Family {
    /// The folders of this family, the highest version first.
    fn folders(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.parent) else {
            return Vec::new();
        };
        let mut found: Vec<(u32, PathBuf)> = entries
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let name = entry.file_name();
                let major = name.to_str()?.strip_prefix(self.prefix)?.parse().ok()?;
                Some((major, entry.path().join(self.bin)))
            })
            .collect();
        found.sort_unstable_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, folder)| folder).collect()
    }

    fn pattern(&self) -> String {
        format!("{}/{}*/{}", self.parent, self.prefix, self.bin)
    }
}

fn pg_config_bindir() -> Option<PathBuf> {
    let output =
        Command::new(on_path("pg_config")?).arg("--bindir").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let folder = text.trim();
    (output.status.success() && !folder.is_empty()).then(|| PathBuf::from(folder))
}

/// Runs `postgres --version` as the account that would run the server, so
/// that a folder this account can't enter doesn't qualify.
fn ask_version(postgres: &Path) -> Result<String, String> {
    let user = ServerUser::pick().map_err(|error| error.to_string())?;
    let mut command = Command::new(postgres);
    command.arg("--version").current_dir("/").stdin(Stdio::null());
    user.apply(&mut command);
    let output = command.output().map_err(|error| {
        format!("its `postgres` can't be run as the account `{}`: {error}", user.name())
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next().unwrap_or("nothing").trim().to_owned();
        return Err(format!("its `postgres --version` failed and said: {said}"));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    parse_version(&text).ok_or_else(|| {
        format!("its `postgres --version` says `{}`, not a version of PostgreSQL", text.trim())
    })
}

/// Takes `15.18` out of `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`.
fn parse_version(text: &str) -> Option<String> {
    let rest = text.trim().strip_prefix("postgres (PostgreSQL) ")?;
    Some(rest.split_whitespace().next()?.to_owned())
}

/// The leading number of `15.18`, `18beta1` or `19devel`.
fn major_of(version: &str) -> Option<u32> {
    let digits = version.find(|c: char| !c.is_ascii_digit());
    version[..digits.unwrap_or(version.len())].parse().ok()
}

pub(crate) fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Makes a folder and its parents.
pub(crate) fn create_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).doing(|| format!("make the folder {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_versions() {
        let debian = "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n";
        assert_eq!(parse_version(debian).as_deref(), Some("15.18"));
        assert_eq!(parse_version("postgres (PostgreSQL) 18.4\n").as_deref(), Some("18.4"));
        assert_eq!(parse_version("psql (PostgreSQL) 15.1"), None);
    }

    #[test]
    fn reads_majors() {
        assert_eq!(major_of("15.18"), Some(15));
        assert_eq!(major_of("18beta1"), Some(18));
        assert_eq!(major_of("19devel"), Some(19));
        assert_eq!(major_of("devel"), None);
    }

    #[test]
    fn refuses_other_majors() {
        assert!(check_major(14).is_err());
        assert!(check_major(15).is_ok());
        assert!(check_major(18).is_ok());
        assert!(check_major(19).is_err());
    }
}
