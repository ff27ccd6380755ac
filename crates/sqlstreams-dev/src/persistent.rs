//! Kept clusters: what `sqlstreams up` and `sqlstreams down` run.

use std::env;
use std::fmt;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf, absolute};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::binaries::Programs;
use crate::error::{Context, Error, Result};
use crate::pidfile::{self, PidFile, live_server};
use crate::port::free_port;
use crate::private::{open_lock, random_password, write_private};
use crate::server::{PortChoice, START_TIMEOUT, SUPERUSER, Server, url};
use crate::settings::Settings;
use crate::user::ServerUser;
use crate::watchdog::Watchdog;

/// How long a fast stop may take before an immediate one follows.
const FAST: Duration = Duration::from_secs(60);

/// How long an immediate stop may take.
const IMMEDIATE: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(10);

/// How the names of folders begin in which a data folder is made.
const UNFINISHED: &str = "unfinished-";

/// A private cluster whose server and data outlive this process.
///
/// One folder holds one cluster: the data, the server's log and a file
/// `connection` with the URL in it, which only its owner can read. Several
/// processes may work on the same folder at once; they take turns.
///
/// The server listens at a free port of 127.0.0.1 and asks for a random
/// password. The port is the same every time unless another program has taken
/// it meanwhile. All methods block the thread.
///
/// # Examples
///
/// ```no_run
/// use sqlstreams_dev::Persistent;
///
/// let kept = Persistent::new(None)?.progress(&|line| eprintln!("{line}"));
/// let info = kept.up()?;
/// println!("{} at {}", if info.already_running { "running" } else { "started" }, info.url);
/// if kept.down()?.is_none() {
///     println!("it wasn't running");
/// }
/// # Ok::<(), sqlstreams_dev::Error>(())
/// ```
#[derive(Clone)]
pub struct Persistent<'a> {
    dir: PathBuf,
    programs: Option<Programs>,
    major: Option<u32>,
    settings: Settings,
    start_timeout: Duration,
    progress: &'a (dyn Fn(&str) + Sync),
}

/// A kept cluster whose server runs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// The URL of the database `postgres`, with the password in it.
    pub url: String,
    /// The port on 127.0.0.1.
    pub port: u16,
    /// The server's process id.
    pub pid: u32,
    /// The server's major version.
    pub major: u32,
    /// The server's data folder.
    pub data_dir: PathBuf,
    /// The server's log file.
    pub log_file: PathBuf,
    /// Whether the server ran before the call.
    pub already_running: bool,
    password: String,
}

/// A kept cluster whose server was stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stopped {
    /// The process id the server had.
    pub pid: u32,
    /// The data folder, which stays.
    pub data_dir: PathBuf,
}

impl Persistent<'_> {
    /// Names the folder of a kept cluster; nothing is touched yet.
    ///
    /// Without a folder it's `/var/lib/sqlstreams` for root, and else
    /// `$XDG_DATA_HOME/sqlstreams` or `~/.local/share/sqlstreams`.
    ///
    /// # Errors
    ///
    /// [`Error::NoHome`] when no folder is given and there's no home, and
    /// [`Error::Io`] when a relative folder can't be resolved.
    pub fn new(dir: Option<&Path>) -> Result<Self> {
        let dir = match dir {
            Some(dir) => dir.to_path_buf(),
            None => default_dir()?,
        };
        let dir = absolute(&dir).doing(|| format!("find the folder {}", dir.display()))?;
        Ok(Self {
            dir,
            programs: None,
            major: None,
            settings: Settings::default(),
            start_timeout: START_TIMEOUT,
            progress: &|_| {},
        })
    }
}

impl<'a> Persistent<'a> {
    /// Uses these programs instead of looking for some.
    #[must_use]
    pub fn programs(mut self, programs: Programs) -> Self {
        self.programs = Some(programs);
        self
    }

    /// Makes a new cluster of this major version, 15 to 18.
    ///
    /// Without this, any supported version will do. A cluster that exists
    /// keeps its version.
    #[must_use]
    pub fn major(mut self, major: u32) -> Self {
        self.major = Some(major);
        self
    }

    /// Adds a server setting for the next start; a later one of the same name wins.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.extra.push((name.into(), value.into()));
        self
    }

    /// How long a start may take, recovery included; 60 s unless given.
    #[must_use]
    pub fn start_timeout(mut self, timeout: Duration) -> Self {
        self.start_timeout = timeout;
        self
    }

    /// Has this called with a line of text before something slow.
    #[must_use]
    pub fn progress<'b>(self, progress: &'b (dyn Fn(&str) + Sync)) -> Persistent<'b>
    where
        'a: 'b,
    {
        Persistent { progress, ..self }
    }

    /// The cluster's folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Makes sure the server runs, making the cluster the first time.
    ///
    /// # Errors
    ///
    /// Those of [`Builder::start`](crate::Builder::start);
    /// [`Error::MajorMismatch`] when the data belongs to a version that's
    /// neither found nor to be had; [`Error::Damaged`] when a file of the
    /// cluster can't be understood.
    pub fn up(&self) -> Result<Info> {
        self.settings.check()?;
        let user = ServerUser::pick()?;
        self.make_dir(&user)?;
        let _lock = self.lock()?;
        let dir = self.real_dir()?;
        let places = Places::new(dir);

        if let Some(file) = self.await_running(&places)? {
            return places.info(file.pid, file.port, true);
        }
        let programs = match places.data_major()? {
            Some(major) => self.programs_for(major, &places)?,
            None => match &self.programs {
                Some(programs) => programs.clone(),
                None => Programs::find_or_obtain(self.major, self.progress)?,
            },
        };
        let server = Server {
            programs,
            user,
            data_dir: places.data_dir.clone(),
            log: places.log.clone(),
            start_timeout: self.start_timeout,
        };
        let version = server.programs.version();
        if !places.data_dir.exists() {
            (self.progress)(&format!(
                "Making a PostgreSQL {version} cluster in {}",
                places.dir.display()
            ));
            initdb(&server, &places)?;
        }
        (self.progress)(&format!("Starting PostgreSQL {version}"));
        let address = places.address()?;
        let (mut child, port) =
            server.start(PortChoice::Prefer(address.port), &self.settings, |_| {})?;
        let pid = child.id();
        // So that a server stopped during this process's life is no zombie.
        thread::spawn(move || child.wait());
        if port != address.port {
            places.remember(&Address { port, ..address })?;
        }
        places.info(pid, Some(port), false)
    }

    /// Stops the server and keeps the data; `None` when it wasn't running.
    ///
    /// # Errors
    ///
    /// [`Error::StopTimeout`] when the server doesn't end, [`Error::Io`] when
    /// it belongs to another user.
    pub fn down(&self) -> Result<Option<Stopped>> {
        if !self.dir.is_dir() {
            return Ok(None);
        }
        let _lock = self.lock()?;
        let places = Places::new(self.real_dir()?);
        let Some(PidFile { pid, .. }) = live_server(&places.data_dir) else {
            return Ok(None);
        };
        for (signal, patience) in [(Signal::INT, FAST), (Signal::QUIT, IMMEDIATE)] {
            pidfile::signal(pid, signal)?;
            let begun = Instant::now();
            while begun.elapsed() < patience {
                if !pidfile::serves(pid, &places.data_dir) {
                    return Ok(Some(Stopped { pid, data_dir: places.data_dir }));
                }
                sleep(POLL);
            }
        }
        Err(Error::StopTimeout { pid, seconds: (FAST + IMMEDIATE).as_secs(), log: places.log })
    }

    /// Tells whether the server runs, and where; starts nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] or [`Error::Io`] when a file of the cluster can't be
    /// understood or read.
    pub fn status(&self) -> Result<Option<Info>> {
        if !self.dir.is_dir() {
            return Ok(None);
        }
        let places = Places::new(self.real_dir()?);
        match live_server(&places.data_dir).filter(|file| file.ready) {
            Some(file) => places.info(file.pid, file.port, true).map(Some),
            None => Ok(None),
        }
    }

    /// Makes the folder; a new one is closed to other users, except that
    /// root's lets the server's account in.
    fn make_dir(&self, user: &ServerUser) -> Result<()> {
        if !self.dir.is_dir() {
            // Better refuse before than after making it.
            if let Some(parent) = self.dir.ancestors().skip(1).find(|parent| parent.is_dir()) {
                user.check_enter(parent)?;
            }
            let mode = match user {
                ServerUser::Current => 0o700,
                ServerUser::Account { .. } => 0o755,
            };
            DirBuilder::new()
                .recursive(true)
                .mode(mode)
                .create(&self.dir)
                .doing(|| format!("make the folder {}", self.dir.display()))?;
        }
        user.check_enter(&self.real_dir()?)
    }

    fn real_dir(&self) -> Result<PathBuf> {
        fs::canonicalize(&self.dir).doing(|| format!("look at the folder {}", self.dir.display()))
    }

    /// Waits until no other process works on this folder.
    fn lock(&self) -> Result<File> {
        let path = self.dir.join("lock");
        let file = open_lock(&path)?;
        let doing = || format!("lock {}", path.display());
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                (self.progress)("Waiting for another process that works on this cluster");
                file.lock().doing(doing)?;
            }
            Err(TryLockError::Error(error)) => return Err(error).doing(doing),
        }
        Ok(file)
    }

    /// The running server, once it's ready; `None` when none runs.
    ///
    /// One that's starting, perhaps in recovery, or about to end is waited for.
    fn await_running(&self, places: &Places) -> Result<Option<PidFile>> {
        let begun = Instant::now();
        loop {
            match live_server(&places.data_dir) {
                Some(file) if file.ready => return Ok(Some(file)),
                None => return Ok(None),
                Some(file) if begun.elapsed() > self.start_timeout => {
                    return Err(Error::NotReady {
                        pid: file.pid,
                        seconds: self.start_timeout.as_secs(),
                        log: places.log.clone(),
                    });
                }
                Some(_) => sleep(POLL),
            }
        }
    }

    /// Programs that can read data of a major version.
    fn programs_for(&self, major: u32, places: &Places) -> Result<Programs> {
        let mismatch = |why: String| Error::MajorMismatch {
            data_dir: places.data_dir.clone(),
            wanted: major,
            why,
        };
        if let Some(programs) = &self.programs {
            if programs.major() == major {
                return Ok(programs.clone());
            }
            return Err(mismatch(format!(
                "{} holds PostgreSQL {}.",
                programs.folder().display(),
                programs.version()
            )));
        }
        Programs::find_or_obtain(Some(major), self.progress).map_err(|error| match error {
            Error::NoPrograms { .. } | Error::UnsupportedMajor { .. } => {
                mismatch(error.to_string())
            }
            other => other,
        })
    }
}

/// Makes the data folder elsewhere first, so that one that was cut short is
/// never taken for whole.
fn initdb(server: &Server, places: &Places) -> Result<()> {
    places.remove_unfinished();
    let doing = || format!("make a folder in {}", places.dir.display());
    let work = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(&places.dir).doing(doing)?;
    server.user.own(work.path())?;
    let unfinished = Server { data_dir: work.path().join("data"), ..server.clone() };
    // Should this process die, initdb and what it made go too.
    let mut watchdog = Watchdog::set(work.path(), &unfinished.data_dir)?;

    let address = Address {
        port: free_port().doing(|| "find a free port".to_owned())?,
        password: random_password().doing(|| "make a password".to_owned())?,
    };
    unfinished.initdb(&address.password, true, |pid| watchdog.tell(pid))?;
    places.remember(&address)?;
    fs::rename(&unfinished.data_dir, &places.data_dir)
        .doing(|| format!("make {}", places.data_dir.display()))
}

impl fmt::Debug for Persistent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Persistent")
            .field("dir", &self.dir)
            .field("programs", &self.programs)
            .field("major", &self.major)
            .field("settings", &self.settings)
            .field("start_timeout", &self.start_timeout)
            .finish_non_exhaustive()
    }
}

impl Info {
    /// The URL of another database on this server, which needn't exist.
    #[must_use]
    pub fn database_url(&self, database: &str) -> String {
        url(&self.password, self.port, database)
    }
}

/// What lies where in a cluster's folder.
struct Places {
    dir: PathBuf,
    data_dir: PathBuf,
    log: PathBuf,
    /// The file with the URL.
    connection: PathBuf,
}

/// How to reach a server.
struct Address {
    port: u16,
    password: String,
}

impl Places {
    fn new(dir: PathBuf) -> Self {
        Self {
            data_dir: dir.join("data"),
            log: dir.join("server.log"),
            connection: dir.join("connection"),
            dir,
        }
    }

    /// Removes what a power cut may have left of an earlier attempt.
    fn remove_unfinished(&self) {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        for entry in entries {
            if entry.file_name().as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
                // It's only in the way of disk space.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// The version that wrote the data; `None` when there's no data.
    fn data_major(&self) -> Result<Option<u32>> {
        if !self.data_dir.exists() {
            return Ok(None);
        }
        let file = self.data_dir.join("PG_VERSION");
        let text = fs::read_to_string(&file).doing(|| format!("read {}", file.display()))?;
        match text.trim().parse() {
            Ok(major) => Ok(Some(major)),
            Err(_) => Err(Error::Damaged {
                file,
                why: "it should hold the major version of PostgreSQL".to_owned(),
            }),
        }
    }

    fn remember(&self, address: &Address) -> Result<()> {
        let text = url(&address.password, address.port, SUPERUSER) + "\n";
        write_private(&self.connection, &text)
            .doing(|| format!("write {}", self.connection.display()))
    }

    fn address(&self) -> Result<Address> {
        let text = fs::read_to_string(&self.connection)
            .doing(|| format!("read {}", self.connection.display()))?;
        Address::parse(text.trim()).ok_or_else(|| Error::Damaged {
            file: self.connection.clone(),
            why: "it should hold the URL of the cluster".to_owned(),
        })
    }

    fn info(&self, pid: u32, port: Option<u16>, already_running: bool) -> Result<Info> {
        let address = self.address()?;
        let port = port.unwrap_or(address.port);
        Ok(Info {
            url: url(&address.password, port, SUPERUSER),
            port,
            pid,
            major: self.data_major()?.unwrap_or_default(),
            data_dir: self.data_dir.clone(),
            log_file: self.log.clone(),
            already_running,
            password: address.password,
        })
    }
}

impl Address {
    fn parse(url: &str) -> Option<Self> {
        let rest = url.strip_prefix("postgres://")?;
        let (_, rest) = rest.split_once(':')?;
        let (password, rest) = rest.split_once('@')?;
        let (_, rest) = rest.split_once(':')?;
        let (port, _) = rest.split_once('/')?;
        Some(Self { port: port.parse().ok()?, password: password.to_owned() })
    }
}

fn default_dir() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty());
    if rustix::process::geteuid().is_root() {
        // Not below /root, where the account that runs the server can't go.
        Ok(PathBuf::from("/var/lib/sqlstreams"))
    } else if let Some(folder) = set("XDG_DATA_HOME") {
        Ok(Path::new(&folder).join("sqlstreams"))
    } else if let Some(home) = set("HOME") {
        Ok(Path::new(&home).join(".local/share/sqlstreams"))
    } else {
        Err(Error::NoHome { variable: "XDG_DATA_HOME" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_its_own_url() {
        let address = Address::parse(&url("secret", 5433, "postgres"));
        assert!(address.is_some_and(|a| a.port == 5433 && a.password == "secret"));
        assert!(Address::parse("postgres://nonsense").is_none());
        assert!(Address::parse("").is_none());
    }
}
