//! What the tests share.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio_postgres::NoTls;

/// Runs a query that gives one text, on a connection of its own.
pub(crate) fn query(url: &str, sql: &str) -> Result<String, tokio_postgres::Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime starts");
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        let connection = tokio::spawn(connection);
        let mut text = String::new();
        for message in client.simple_query(sql).await? {
            if let tokio_postgres::SimpleQueryMessage::Row(row) = message {
                text.push_str(row.get(0).unwrap_or("NULL"));
            }
        }
        drop(client);
        let _ = connection.await;
        Ok(text)
    })
}

/// Whether a process exists that isn't a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    let output =
        Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().expect("ps runs");
    let state = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    !state.is_empty() && !state.starts_with('Z')
}

/// Waits until something holds, at most 20 s.
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The folder that goes with a cluster.
pub(crate) fn folder_of(data_dir: &Path) -> &Path {
    data_dir.parent().expect("a data folder is inside another")
}

/// A temporary folder other accounts can enter, as root's servers have another one.
pub(crate) fn open_folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder is made");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))
        .expect("the mode can be set");
    folder
}

pub(crate) fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).expect("it can be read").next().is_none()
}

/// Makes a program out of a line of shell.
///
/// Another process writes it: a file this one has open for writing can't be
/// run, and a test beside this one may be just about to start something.
pub(crate) fn script(folder: &Path, name: &str, line: &str) {
    let status = Command::new("/bin/sh")
        .args(["-c", r#"printf '#!/bin/sh\n%s\n' "$2" >"$1" && chmod 755 "$1""#, "sh"])
        .arg(folder.join(name))
        .arg(line)
        .status()
        .expect("a shell runs");
    assert!(status.success());
}

/// Runs one ignored test of this program in a process of its own.
pub(crate) fn in_own_process(test: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command
        .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command
}
