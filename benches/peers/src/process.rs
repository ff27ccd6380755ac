//! A peer's own server: a process on a free port, with a folder of its own, which goes with the value.

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::net::TcpStream;

/// How long a server may take to listen.
const START: Duration = Duration::from_secs(60);
/// How long it may take to stop before it is killed.
const STOP: Duration = Duration::from_secs(10);

/// A running server. Dropped, it and what it started are stopped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    log: PathBuf,
}

impl Server {
    /// Starts it in a process group of its own: a Ctrl-C at the terminal does not reach it, and its children go with it.
    pub(crate) fn start(command: &mut Command, folder: &Path) -> Result<Self> {
        let program = command.get_program().to_owned();
        let log = folder.join("log");
        let file = File::create(&log).context("could not create a log")?;
        let child = command
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0)
            .spawn()
            .with_context(|| format!("could not start {}", program.display()))?;
        Ok(Self { child, log })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it listens.
    pub(crate) async fn listens(&mut self, port: u16) -> Result<()> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("the server ended with {status}; {}", self.last_words());
            }
            if TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
                return Ok(());
            }
            if begun.elapsed() > START {
                bail!("the server does not listen after {START:?}; {}", self.last_words());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The end of what it wrote.
    pub(crate) fn last_words(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>();
        format!("its last words: {}", lines[lines.len().saturating_sub(4)..].join(" / "))
    }

    fn signal(&self, signal: Signal) {
        // Not waited for before this: the number is still that of this child and of its group.
        if let Some(group) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process_group(group, signal);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        let begun = Instant::now();
        while begun.elapsed() < STOP && has_not_ended(&mut self.child) {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Looks without reaping, so that the number of the group stays taken.
fn has_not_ended(child: &mut Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    let state = stat.rfind(')').and_then(|end| stat[end + 1..].trim_start().chars().next());
    !matches!(state, None | Some('Z'))
}

/// A port that nothing listens at.
pub(crate) fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("could not find a free port")?;
    Ok(listener.local_addr()?.port())
}
