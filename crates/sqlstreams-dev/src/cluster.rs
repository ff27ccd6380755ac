//! Throw-away clusters.

use std::env;
use std::fmt;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::Signal;

use crate::binaries::Programs;
use crate::error::{Context, Error, Result};
use crate::private::{random_name, random_password};
use crate::server::{PortChoice, START_TIMEOUT, SUPERUSER, Server, end, url};
use crate::settings::Settings;
use crate::user::ServerUser;
use crate::watchdog::Watchdog;

/// How long a server may take to stop before it's killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// How a server is told to stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopMode {
    /// Rolls back open transactions, closes connections, writes everything
    /// out and ends (`SIGINT`).
    #[default]
    Fast,
    /// Ends at once and recovers from its log at the next start (`SIGQUIT`).
    Immediate,
}

/// A private PostgreSQL server that goes when this value or its process goes.
///
/// It listens at a free port of 127.0.0.1 and asks for a random password, so
/// no other user of the machine gets in. Dropping the value stops the server
/// and deletes its data. If the process ends without that (a panic, `exit`, a
/// `static`, even `SIGKILL`), a small shell started beside the server does it.
///
/// All methods block the thread; from async code call the slow ones in
/// `spawn_blocking`. They take `&self`, so a cluster may be shared by threads.
///
/// # Examples
///
/// ```no_run
/// use sqlstreams_dev::{Cluster, StopMode};
///
/// let cluster = Cluster::builder()
///     .progress(&|line| eprintln!("{line}"))
///     .setting("log_statement", "all")
///     .start()?;
/// println!("connect to {}", cluster.url("postgres"));
///
/// cluster.stop(StopMode::Fast)?;
/// cluster.start_again()?; // at the same URL, with the same data
/// # Ok::<(), sqlstreams_dev::Error>(())
/// ```
#[derive(Debug)]
pub struct Cluster {
    // In the order in which they are to go.
    running: Mutex<Running>,
    server: Server,
    settings: Settings,
    port: u16,
    password: String,
}

/// What changes during a cluster's life.
#[derive(Debug)]
struct Running {
    child: Option<Child>,
    watchdog: Watchdog,
}

impl Cluster {
    /// Begins a cluster; see [`Builder`] for the choices.
    #[must_use]
    pub fn builder() -> Builder<'static> {
        Builder::default()
    }

    /// Starts a cluster with all the defaults.
    ///
    /// # Errors
    ///
    /// As for [`Builder::start`].
    pub fn start() -> Result<Self> {
        Self::builder().start()
    }

    /// The URL of a database on this server, with the password in it:
    /// `postgres://postgres:…@127.0.0.1:…/database`.
    ///
    /// The database needn't exist; `postgres` always does. The URL stays the
    /// same when the server is stopped and started again.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        url(&self.password, self.port, database)
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The name of the superuser, who owns everything.
    #[must_use]
    pub fn superuser(&self) -> &'static str {
        SUPERUSER
    }

    /// The superuser's password.
    #[must_use]
    pub fn password(&self) -> &str {
        &self.password
    }

    /// The programs this server runs from, and with them its version.
    #[must_use]
    pub fn programs(&self) -> &Programs {
        &self.server.programs
    }

    /// The server's major version, 15 to 18.
    #[must_use]
    pub fn major(&self) -> u32 {
        self.server.programs.major()
    }

    /// The server's data folder.
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.server.data_dir
    }

    /// The server's log file.
    #[must_use]
    pub fn log_file(&self) -> &Path {
        &self.server.log
    }

    /// The process id of the server, if it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.lock().alive().map(|child| child.id())
    }

    /// Whether the server runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.pid().is_some()
    }

    /// Stops the server and keeps its data; does nothing when it's stopped.
    ///
    /// A server that hasn't ended after 30 s is killed.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the server can't be sent a signal.
    pub fn stop(&self, mode: StopMode) -> Result<()> {
        let signal = match mode {
            StopMode::Fast => Signal::INT,
            StopMode::Immediate => Signal::QUIT,
        };
        let mut running = self.lock();
        if let Some(child) = running.alive() {
            end(child, signal, STOP_TIMEOUT)?;
        }
        running.child = None;
        Ok(())
    }

    /// Kills the server's main process (`SIGKILL`), as a crash would.
    ///
    /// Returns when that process is gone. The processes that serve single
    /// connections notice within moments and end by themselves; one in the
    /// midst of a long computation may go on until it next looks.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the server can't be killed.
    pub fn kill(&self) -> Result<()> {
        let mut running = self.lock();
        if let Some(child) = running.alive() {
            child
                .kill()
                .and_then(|()| child.wait())
                .doing(|| "kill the PostgreSQL server".to_owned())?;
        }
        running.child = None;
        Ok(())
    }

    /// Starts the server again after a stop or a crash: same port, same data.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyRunning`]; [`Error::PortTaken`] when another program
    /// has taken the port for more than 10 s; [`Error::Start`] and
    /// [`Error::StartTimeout`] with the end of the server's log.
    pub fn start_again(&self) -> Result<()> {
        let mut running = self.lock();
        if running.alive().is_some() {
            return Err(Error::AlreadyRunning { data_dir: self.server.data_dir.clone() });
        }
        let (child, _) = self.server.start(PortChoice::Only(self.port), &self.settings, |pid| {
            running.watchdog.tell(pid);
        })?;
        running.child = Some(child);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
        // A panic elsewhere leaves a child that is or isn't there: fit for use.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    /// The child, if it lives.
    fn alive(&mut self) -> Option<&mut Child> {
        if matches!(self.child.as_mut()?.try_wait(), Ok(Some(_))) {
            self.child = None;
        }
        self.child.as_mut()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(child) = running.alive() {
            // Immediate: the data goes next, so writing it out would be waste.
            // A failure here or below is left to the watchdog.
            let _ = end(child, Signal::QUIT, STOP_TIMEOUT);
        }
        // The folder, and what a server that was killed left elsewhere.
        running.watchdog.finish();
    }
}

/// The choices for a [`Cluster`]; start with [`Cluster::builder`].
///
/// Unless chosen otherwise, a cluster is as durable as PostgreSQL is by
/// default, takes 200 connections and 64 prepared transactions, has 256 MB of
/// shared buffers, the encoding UTF-8, the locale C.UTF-8 and the time zone
/// UTC.
#[derive(Clone)]
pub struct Builder<'a> {
    programs: Option<Programs>,
    major: Option<u32>,
    settings: Settings,
    base_dir: Option<PathBuf>,
    start_timeout: Duration,
    progress: &'a (dyn Fn(&str) + Sync),
}

impl Default for Builder<'_> {
    fn default() -> Self {
        Self {
            programs: None,
            major: None,
            settings: Settings::throw_away(),
            base_dir: None,
            start_timeout: START_TIMEOUT,
            progress: &|_| {},
        }
    }
}

impl fmt::Debug for Builder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("programs", &self.programs)
            .field("major", &self.major)
            .field("settings", &self.settings)
            .field("base_dir", &self.base_dir)
            .field("start_timeout", &self.start_timeout)
            .finish_non_exhaustive()
    }
}

impl<'a> Builder<'a> {
    /// Uses these programs instead of looking for some.
    #[must_use]
    pub fn programs(mut self, programs: Programs) -> Self {
        self.programs = Some(programs);
        self
    }

    /// Uses programs of this major version, 15 to 18: found here or downloaded.
    ///
    /// Without this, programs of any supported version will do.
    #[must_use]
    pub fn major(mut self, major: u32) -> Self {
        self.major = Some(major);
        self
    }

    /// Adds a server setting; a later one of the same name wins.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.extra.push((name.into(), value.into()));
        self
    }

    /// With `false`, turns `fsync`, `synchronous_commit` and
    /// `full_page_writes` off: faster, but a crash of the machine loses data.
    /// A crash of the server alone may lose the last second's commits.
    #[must_use]
    pub fn durable(mut self, durable: bool) -> Self {
        self.settings.not_durable = !durable;
        self
    }

    /// Puts the cluster's folder below this one instead of the system's
    /// temporary folder.
    #[must_use]
    pub fn base_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.base_dir = Some(folder.into());
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
    pub fn progress<'b>(self, progress: &'b (dyn Fn(&str) + Sync)) -> Builder<'b>
    where
        'a: 'b,
    {
        Builder { progress, ..self }
    }

    /// Makes the cluster and starts its server; takes one to two seconds.
    ///
    /// # Errors
    ///
    /// Those of [`Programs::find_or_obtain`] and [`obtain`](crate::obtain());
    /// [`Error::BadSetting`]; [`Error::NoAccount`] and [`Error::NotEnterable`]
    /// as root; [`Error::Initdb`], [`Error::Start`] and
    /// [`Error::StartTimeout`] with the end of the log.
    pub fn start(self) -> Result<Cluster> {
        self.settings.check()?;
        let programs = match self.programs {
            Some(programs) => programs,
            None => Programs::find_or_obtain(self.major, self.progress)?,
        };
        let user = ServerUser::pick()?;
        let (path, mut watchdog) = make_dir(self.base_dir.as_deref(), &user)?;
        let server = Server {
            programs,
            user,
            data_dir: path.join("data"),
            log: path.join("server.log"),
            start_timeout: self.start_timeout,
        };

        let password = random_password().doing(|| "make a password".to_owned())?;
        (self.progress)(&format!("Starting a private PostgreSQL {}", server.programs.version()));
        server.initdb(&password, false, |pid| watchdog.tell(pid))?;
        let (child, port) =
            server.start(PortChoice::Any, &self.settings, |pid| watchdog.tell(pid))?;
        Ok(Cluster {
            running: Mutex::new(Running { child: Some(child), watchdog }),
            server,
            settings: self.settings,
            port,
            password,
        })
    }
}

/// Makes the cluster's own folder, which belongs to the server's account, and
/// sets the watchdog on it: before it exists, so that nothing is left behind
/// however soon this process dies.
fn make_dir(base: Option<&Path>, user: &ServerUser) -> Result<(PathBuf, Watchdog)> {
    let base = match base {
        Some(base) => base.to_path_buf(),
        None => temp_dir(user),
    };
    let doing = || format!("make a folder in {}", base.display());
    let base = fs::canonicalize(&base).doing(doing)?;
    user.check_enter(&base)?;
    // Nobody else can guess the name, so what has it is ours.
    let path = base.join(format!("sqlstreams-{}", random_name().doing(doing)?));
    let watchdog = Watchdog::set(&path, &path.join("data"))?;
    DirBuilder::new().mode(0o700).create(&path).doing(doing)?;
    user.own(&path)?;
    Ok((path, watchdog))
}

/// The system's temporary folder, or another one if root's is closed to others.
fn temp_dir(user: &ServerUser) -> PathBuf {
    let first = env::temp_dir();
    [first.clone(), "/tmp".into(), "/var/tmp".into()]
        .into_iter()
        .find(|folder| {
            fs::canonicalize(folder).is_ok_and(|folder| user.check_enter(&folder).is_ok())
        })
        .unwrap_or(first)
}
