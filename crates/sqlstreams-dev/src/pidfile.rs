//! `postmaster.pid`: who runs in a data folder, and whether it's ready.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::error::{Context, Result};

/// What a server wrote about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PidFile {
    pub(crate) pid: u32,
    pub(crate) port: Option<u16>,
    pub(crate) ready: bool,
}

impl PidFile {
    /// Reads the file; `None` when there's none, or it's half written.
    pub(crate) fn read(data_dir: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(path(data_dir)).ok()?)
    }

    /// Lines: pid, data folder, start time, port, socket folder, address,
    /// shared memory, status.
    fn parse(text: &str) -> Option<Self> {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        Some(Self {
            pid: lines.first()?.parse().ok().filter(|pid| *pid > 1)?,
            port: lines.get(3).and_then(|line| line.parse().ok()),
            ready: lines.get(7) == Some(&"ready"),
        })
    }
}

fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("postmaster.pid")
}

/// The live server of a data folder, if there's one.
///
/// The file alone proves nothing: after a power cut it's still there, and its
/// process id may by now belong to any program.
pub(crate) fn live_server(data_dir: &Path) -> Option<PidFile> {
    PidFile::read(data_dir).filter(|file| serves(file.pid, data_dir))
}

/// Removes a left-over file whose process id now belongs to another program.
///
/// `PostgreSQL` ignores the file when no such process exists, but believes it
/// when one does.
pub(crate) fn remove_if_misleading(data_dir: &Path) -> Result<()> {
    let Some(file) = PidFile::read(data_dir) else {
        return Ok(());
    };
    match command_line(file.pid) {
        Some(line) if !is_postgres(&line) => {
            let path = path(data_dir);
            fs::remove_file(&path).doing(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Sends a signal to a process; one that's gone already is no error.
pub(crate) fn signal(pid: u32, signal: Signal) -> Result<()> {
    let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return Ok(());
    };
    match kill_process(target, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(errno) => Err(io::Error::from(errno))
            .doing(|| format!("send a signal to the PostgreSQL server, process {pid}")),
    }
}

/// Whether a process is the server of a data folder.
///
/// A server keeps the command line it was started with, and the data folder
/// as its working folder.
pub(crate) fn serves(pid: u32, data_dir: &Path) -> bool {
    let Some(line) = command_line(pid) else {
        return false;
    };
    let named = data_dir.to_str().is_some_and(|dir| line.contains(dir));
    let inside = || fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == data_dir);
    is_postgres(&line) && (named || inside())
}

/// The command line of a live process; `None` for a dead one or a zombie.
fn command_line(pid: u32) -> Option<String> {
    if Path::new("/proc/self/cmdline").exists() {
        let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&bytes).replace('\0', " ");
        return (!line.is_empty()).then_some(line);
    }
    let output = Command::new("ps")
        .args(["-ww", "-o", "command=", "-p", &pid.to_string()])
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let line = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (!line.is_empty() && !line.contains("<defunct>")).then_some(line)
}

/// Whether the program of a command line is a server.
fn is_postgres(line: &str) -> bool {
    // A path may hold spaces, so look at the part before the first option.
    let program = line.split(" -").next().unwrap_or(line).trim_end();
    program.ends_with("postgres") || program.ends_with("postmaster")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_whole_file() {
        let text = "123\n/data\n1700000000\n5433\n\n127.0.0.1\n  1234 56\nready   \n";
        let file = PidFile::parse(text);
        assert_eq!(file, Some(PidFile { pid: 123, port: Some(5433), ready: true }));
    }

    #[test]
    fn a_half_written_file_is_not_ready() {
        assert_eq!(PidFile::parse(""), None);
        assert!(PidFile::parse("123\n/data\n").is_some_and(|file| !file.ready));
    }

    #[test]
    fn never_names_everyone_or_init() {
        for text in ["-1\n", "0\n", "1\n"] {
            assert_eq!(PidFile::parse(text), None);
        }
    }

    #[test]
    fn tells_servers_from_other_programs() {
        assert!(is_postgres("/usr/lib/postgresql/15/bin/postgres -D /data"));
        assert!(is_postgres("/a folder/bin/postgres -D /data"));
        assert!(!is_postgres("tail -f /data/postgres"));
        assert!(!is_postgres("vim /data/postgresql.conf"));
    }

    #[test]
    fn this_process_serves_nothing() {
        assert!(!serves(std::process::id(), Path::new("/")));
    }
}
