//! Running a command for each message.

use std::collections::VecDeque;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;
use sqlstreams::{Delivery, MAX_ERROR_BYTES, Outcome};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin};

use super::Shared;
use crate::failure::Failure;

/// `EX_DATAERR` of sysexits: the input is wrong, and will be the next time.
const EXIT_DEAD: i32 = 65;
/// What is kept of stderr: its end, with room for how the command ended.
const KEPT: usize = MAX_ERROR_BYTES - 100;
/// The longest that Linux takes as one variable, its name included, is 128 KiB.
const MOST_HEADERS: usize = 127 * 1024;
/// How long what a command left running may keep its pipes open.
const LEFTOVERS: Duration = Duration::from_millis(500);

/// A command that handles messages. Cheap to clone.
#[derive(Clone)]
pub(super) struct Command {
    inner: Arc<Inner>,
}

struct Inner {
    program: OsString,
    args: Vec<OsString>,
    stream: String,
    group: String,
    shared: Shared,
}

/// Refuses a command that cannot be run, before a message is claimed for it.
pub(super) fn check(command: &[OsString]) -> Result<(), Failure> {
    let Some(program) = command.first().map(Path::new) else {
        return Err(Failure::usage("no_command", "--exec needs a command"));
    };
    let refuse = |why: &str| {
        Err(Failure::usage("no_command", format!("cannot run {}: {why}", program.display()))
            .hint("Give the path of a program, or `sh -c '…'` for a line of shell."))
    };
    let candidates: Vec<PathBuf> = if program.components().count() > 1 || program.is_absolute() {
        vec![program.to_path_buf()]
    } else {
        let path = env::var_os("PATH").unwrap_or_default();
        env::split_paths(&path).map(|folder| folder.join(program)).collect()
    };
    let found: Vec<fs::Metadata> =
        candidates.iter().filter_map(|path| fs::metadata(path).ok()).collect();
    if found.iter().any(|about| about.is_file() && about.permissions().mode() & 0o111 != 0) {
        return Ok(());
    }
    match found.is_empty() {
        true => refuse("there is no such program"),
        false => refuse("it is no program, or may not be run"),
    }
}

impl Command {
    pub(super) fn new(command: &[OsString], stream: &str, group: &str, shared: Shared) -> Self {
        let (program, args) = match command.split_first() {
            Some((program, args)) => (program.clone(), args.to_vec()),
            None => (OsString::new(), Vec::new()),
        };
        Self {
            inner: Arc::new(Inner {
                program,
                args,
                stream: stream.to_owned(),
                group: group.to_owned(),
                shared,
            }),
        }
    }

    pub(super) async fn handle(self, message: Delivery<Vec<u8>>) -> Outcome {
        let shared = &self.inner.shared;
        let headers = (!message.headers.is_empty()).then(|| json!(message.headers).to_string());
        if let Some(headers) = headers.as_ref().filter(|headers| headers.len() > MOST_HEADERS) {
            let bytes = headers.len();
            return Outcome::Dead(format!(
                "{bytes} bytes of headers are more than a command's environment takes"
            ));
        }
        let child = match self.spawn(&message, headers) {
            Ok(child) => child,
            // Not the message's fault, so no attempt of it is spent.
            Err(error) => {
                let program = Path::new(&self.inner.program).display();
                let failure =
                    Failure::failed("no_command", format!("cannot run {program}: {error}"));
                return shared.give_up(Some(failure)).await;
            }
        };
        let (status, stderr) = match finish(child, &message.payload).await {
            Ok(finished) => finished,
            Err(error) => return Outcome::Retry(format!("lost touch with the command: {error}")),
        };
        let outcome = judge(status, &stderr);
        if outcome == Outcome::Done {
            shared.count();
        } else {
            tracing::info!(id = message.id, attempt = message.attempt(), ?outcome, "not handled");
        }
        outcome
    }

    fn spawn(&self, message: &Delivery<Vec<u8>>, headers: Option<String>) -> io::Result<Child> {
        let inner = &*self.inner;
        let mut command = tokio::process::Command::new(&inner.program);
        command
            .args(&inner.args)
            .env("SQLSTREAMS_ID", message.id.to_string())
            .env("SQLSTREAMS_ATTEMPT", message.attempt().to_string())
            .env("SQLSTREAMS_STREAM", &inner.stream)
            .env("SQLSTREAMS_GROUP", &inner.group)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            // A Ctrl-C at the terminal is for us, who let the command finish.
            .process_group(0)
            .kill_on_drop(true);
        let tombstone = message.tombstone.then(|| "1".to_owned());
        for (variable, value) in [
            ("SQLSTREAMS_KEY", message.key.clone()),
            ("SQLSTREAMS_ROUTING_KEY", message.routing_key.clone()),
            ("SQLSTREAMS_HEADERS", headers),
            ("SQLSTREAMS_TOMBSTONE", tombstone),
        ] {
            match value {
                Some(value) => command.env(variable, value),
                // Ours may be those of an outer message.
                None => command.env_remove(variable),
            };
        }
        command.spawn()
    }
}

/// Feeds the command and waits for it. All at once: it may write before it has read everything.
async fn finish(mut child: Child, payload: &[u8]) -> io::Result<(ExitStatus, Vec<u8>)> {
    let mut said = VecDeque::new();
    let mut family = Family(child.id().and_then(|id| Pid::from_raw(id.cast_signed())));
    let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
    let status = {
        let talking = async { tokio::join!(feed(stdin, payload), read_end(stderr, &mut said)) };
        let mut talking = pin!(talking);
        let mut open = true;
        let mut ended = pin!(child.wait());
        let status = loop {
            tokio::select! {
                status = &mut ended => break status?,
                _ = &mut talking, if open => open = false,
            }
        };
        if open {
            // What it left running may hold its pipes open; its own words are in them by now.
            let _ = tokio::time::timeout(LEFTOVERS, talking).await;
        }
        status
    };
    // It ended by itself: what it left running is meant to run.
    family.0 = None;
    Ok((status, said.into()))
}

/// A command's process group, which is the command and what it started. Killed with it when it is given up: by a timeout, or
/// by a second signal.
struct Family(Option<Pid>);

impl Drop for Family {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

/// A command need not read its stdin: that it closes the pipe is no failure.
async fn feed(stdin: Option<ChildStdin>, payload: &[u8]) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(payload).await;
        let _ = stdin.shutdown().await;
    }
}

/// Reads to the end, and keeps the end.
async fn read_end(from: Option<ChildStderr>, kept: &mut VecDeque<u8>) {
    let Some(mut from) = from else { return };
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        kept.extend(&buffer[..read]);
        if kept.len() > KEPT {
            kept.drain(..kept.len() - KEPT);
        }
    }
}

fn judge(status: ExitStatus, stderr: &[u8]) -> Outcome {
    let said = String::from_utf8_lossy(stderr);
    let said = said.trim();
    let ended = match (status.code(), status.signal()) {
        (Some(0), _) => return Outcome::Done,
        (Some(EXIT_DEAD), _) if !said.is_empty() => return Outcome::Dead(said.to_owned()),
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "ended in an unknown way".to_owned(),
    };
    let error = if said.is_empty() { ended } else { format!("{ended}: {said}") };
    match status.code() {
        Some(EXIT_DEAD) => Outcome::Dead(error),
        _ => Outcome::Retry(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_decides() {
        let exit =
            |code: i32, stderr: &str| judge(ExitStatus::from_raw(code << 8), stderr.as_bytes());
        assert_eq!(exit(0, "chatter"), Outcome::Done);
        assert_eq!(exit(65, "no such customer\n"), Outcome::Dead("no such customer".into()));
        assert_eq!(exit(65, ""), Outcome::Dead("exit code 65".into()));
        assert_eq!(exit(1, "busy"), Outcome::Retry("exit code 1: busy".into()));
        assert_eq!(
            judge(ExitStatus::from_raw(9), b""),
            Outcome::Retry("killed by signal 9".into())
        );
    }

    #[test]
    fn what_cannot_be_run_is_refused() {
        let check = |program: &str| check(&[program.into()]);
        assert!(check("sh").is_ok() && check("/bin/sh").is_ok());
        assert!(check("no-such-program").unwrap_err().to_string().contains("no such program"));
        assert!(check("/etc/passwd").unwrap_err().to_string().contains("may not be run"));
    }
}
