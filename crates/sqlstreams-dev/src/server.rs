//! Makes data folders and starts servers on them: what throw-away and kept
//! clusters share.

use std::env;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::binaries::Programs;
use crate::error::{Context, Error, Result};
use crate::log::LogMark;
use crate::pidfile::{self, PidFile};
use crate::port::{free_port, is_free};
use crate::private::write_private;
use crate::settings::{self, Settings};
use crate::user::ServerUser;

/// The role every private cluster has.
pub(crate) const SUPERUSER: &str = "postgres";

/// How long a server may take to become ready unless told otherwise.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How often to look whether something has happened.
const POLL: Duration = Duration::from_millis(5);

/// How long a start waits for a killed predecessor's processes and for its port.
const PATIENCE: Duration = Duration::from_secs(10);

/// The fixed things of one server: programs, account and places.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    pub(crate) programs: Programs,
    pub(crate) user: ServerUser,
    pub(crate) data_dir: PathBuf,
    pub(crate) log: PathBuf,
    pub(crate) start_timeout: Duration,
}

/// Where a server may listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortChoice {
    /// At any free port.
    Any,
    /// At this one, or at any other if it's taken.
    Prefer(u16),
    /// At this one only.
    Only(u16),
}

/// Why a server did not come up.
enum StartFailure {
    /// Another program took the port.
    PortInUse,
    /// Processes of a killed predecessor are still at work.
    PredecessorAlive(Error),
    /// Anything else.
    Other(Error),
}

impl Server {
    /// Makes the data folder: UTF-8, a password for every connection.
    ///
    /// `announce` is told the process ids of what is started.
    pub(crate) fn initdb(
        &self,
        password: &str,
        sync: bool,
        mut announce: impl FnMut(u32),
    ) -> Result<()> {
        let parent = self.data_dir.parent().unwrap_or(&self.data_dir);
        let password_file = parent.join("initdb-password");
        let doing = || format!("write {}", password_file.display());
        write_private(&password_file, password).doing(doing)?;
        self.user.own(&password_file)?;

        let mut failed = None;
        // Not every system has the locale C.UTF-8; all have C.
        for locale in ["C.UTF-8", "C"] {
            failed = self.run_initdb(locale, &password_file, sync, &mut announce)?;
            match &failed {
                Some(log) if log.text().contains("invalid locale name") => {}
                _ => break,
            }
        }
        fs::remove_file(&password_file).doing(|| format!("remove {}", password_file.display()))?;
        if let Some(log) = failed {
            return Err(Error::Initdb { data_dir: self.data_dir.clone(), log: log.tail() });
        }
        settings::include(&self.data_dir)
    }

    /// One run of `initdb`; the log when it failed.
    fn run_initdb(
        &self,
        locale: &str,
        password_file: &Path,
        sync: bool,
        announce: &mut impl FnMut(u32),
    ) -> Result<Option<LogMark>> {
        let log = LogMark::new(&self.log);
        let mut command = self.command(&self.programs.initdb(), &log)?;
        command
            .arg("-D")
            .arg(&self.data_dir)
            .args(["-U", SUPERUSER, "--auth=scram-sha-256", "--encoding=UTF8"])
            .arg(format!("--locale={locale}"))
            .args(["--lc-messages=C", "--no-instructions"])
            .arg("--pwfile")
            .arg(password_file);
        if !sync {
            command.arg("--no-sync");
        }
        let mut child = self.spawn(command)?;
        announce(child.id());
        let status = child.wait().doing(|| "wait for initdb".to_owned())?;
        Ok((!status.success()).then_some(log))
    }

    /// Starts a server and waits until it takes connections.
    ///
    /// `announce` is told the process ids of what is started.
    pub(crate) fn start(
        &self,
        choice: PortChoice,
        settings: &Settings,
        mut announce: impl FnMut(u32),
    ) -> Result<(Child, u16)> {
        let any = || free_port().doing(|| "find a free port".to_owned());
        let mut port = match choice {
            PortChoice::Only(port) => port,
            PortChoice::Prefer(port) if is_free(port) => port,
            PortChoice::Prefer(_) | PortChoice::Any => any()?,
        };
        let begun = Instant::now();
        loop {
            let error = match self.try_start(port, settings, &mut announce) {
                Ok(child) => return Ok((child, port)),
                Err(StartFailure::Other(error)) => return Err(error),
                Err(StartFailure::PredecessorAlive(error)) => error,
                Err(StartFailure::PortInUse) => {
                    Error::PortTaken { port, data_dir: self.data_dir.clone() }
                }
            };
            if begun.elapsed() > PATIENCE {
                return Err(error);
            }
            if !matches!(choice, PortChoice::Only(_)) && !is_free(port) {
                port = any()?;
            }
            sleep(Duration::from_millis(50));
        }
    }

    fn try_start(
        &self,
        port: u16,
        settings: &Settings,
        announce: &mut impl FnMut(u32),
    ) -> Result<Child, StartFailure> {
        let (mut child, log) = self.launch(port, settings).map_err(StartFailure::Other)?;
        announce(child.id());
        match self.wait_ready(&mut child, &log) {
            Ok(()) => Ok(child),
            Err(failure) => {
                // It has ended, or is too slow; the failure tells more than
                // an error in ending it would.
                let _ = end(&mut child, Signal::QUIT, Duration::from_secs(5));
                Err(failure)
            }
        }
    }

    fn launch(&self, port: u16, settings: &Settings) -> Result<(Child, LogMark)> {
        pidfile::remove_if_misleading(&self.data_dir)?;
        settings.write(&self.data_dir, &self.user)?;
        let log = LogMark::new(&self.log);
        let mut command = self.command(&self.programs.postgres(), &log)?;
        command.arg("-D").arg(&self.data_dir).args(["-p", &port.to_string()]);
        Ok((self.spawn(command)?, log))
    }

    /// Waits for the server's own word; this costs it no connection.
    fn wait_ready(&self, child: &mut Child, log: &LogMark) -> Result<(), StartFailure> {
        let begun = Instant::now();
        loop {
            let exited = child
                .try_wait()
                .doing(|| "look after the PostgreSQL server".to_owned())
                .map_err(StartFailure::Other)?;
            if exited.is_some() {
                return Err(self.explain(log));
            }
            let ready = |file: PidFile| file.pid == child.id() && file.ready;
            if PidFile::read(&self.data_dir).is_some_and(ready) {
                return Ok(());
            }
            if begun.elapsed() > self.start_timeout {
                return Err(StartFailure::Other(Error::StartTimeout {
                    version: self.programs.version().to_owned(),
                    data_dir: self.data_dir.clone(),
                    seconds: self.start_timeout.as_secs(),
                    log: log.tail(),
                }));
            }
            sleep(POLL);
        }
    }

    /// Reads out of the log why the server ended.
    fn explain(&self, log: &LogMark) -> StartFailure {
        let text = log.text();
        let error = Error::Start {
            version: self.programs.version().to_owned(),
            data_dir: self.data_dir.clone(),
            log: log.tail(),
        };
        if text.contains("could not bind") && text.contains("Address already in use") {
            StartFailure::PortInUse
        } else if text.contains("pre-existing shared memory block") {
            StartFailure::PredecessorAlive(error)
        } else {
            StartFailure::Other(error)
        }
    }

    /// A server program with its surroundings: account, folder, environment, log.
    fn command(&self, program: &Path, log: &LogMark) -> Result<Command> {
        let (stdout, stderr) = log.outputs()?;
        let mut command = Command::new(program);
        // PGDATA, PGPORT, PGOPTIONS and the like are meant for other servers.
        for (name, _) in env::vars_os() {
            if name.as_encoded_bytes().starts_with(b"PG") {
                command.env_remove(name);
            }
        }
        command
            .env("LC_ALL", "C")
            .current_dir(self.data_dir.parent().unwrap_or(&self.data_dir))
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            // Ctrl-C at the terminal is for the client first.
            .process_group(0);
        self.user.apply(&mut command);
        Ok(command)
    }

    fn spawn(&self, mut command: Command) -> Result<Child> {
        command
            .spawn()
            .doing(|| format!("run {} as {}", command.get_program().display(), self.user.name()))
    }
}

/// Tells a child to end and waits for it; kills it after `patience`.
pub(crate) fn end(child: &mut Child, with: Signal, patience: Duration) -> Result<()> {
    pidfile::signal(child.id(), with)?;
    if wait(child, patience).is_none() {
        child
            .kill()
            .and_then(|()| child.wait())
            .doing(|| "kill the PostgreSQL server".to_owned())?;
    }
    Ok(())
}

/// Waits for a child for a limited time.
fn wait(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let begun = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if begun.elapsed() < patience => sleep(POLL),
            _ => return None,
        }
    }
}

/// The URL of a database on a private cluster.
pub(crate) fn url(password: &str, port: u16, database: &str) -> String {
    let mut path = String::new();
    for byte in database.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            path.push(char::from(byte));
        } else {
            path.push_str(&format!("%{byte:02X}"));
        }
    }
    format!("postgres://{SUPERUSER}:{password}@127.0.0.1:{port}/{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_may_have_any_name() {
        assert_eq!(url("pw", 5, "a b/ü"), "postgres://postgres:pw@127.0.0.1:5/a%20b%2F%C3%BC");
    }
}
