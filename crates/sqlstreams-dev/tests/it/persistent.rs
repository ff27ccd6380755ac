//! Kept clusters.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::thread;
use std::time::Duration;

use sqlstreams_dev::{Error, Persistent, Programs};
use tempfile::TempDir;

use crate::support::{in_own_process, is_alive, open_folder, query};

const DIR: &str = "SQLSTREAMS_TEST_DIR";

/// A folder for a kept cluster, which is stopped when the test ends.
struct Kept(TempDir);

impl Kept {
    fn new() -> Self {
        Self(open_folder())
    }

    fn path(&self) -> String {
        self.0.path().to_str().expect("it's plain text").to_owned()
    }

    fn handle(&self) -> Persistent<'static> {
        Persistent::new(Some(self.0.path())).expect("a folder will do")
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.handle().down();
    }
}

#[test]
fn keeps_data_and_address_from_up_to_up() {
    let kept = Kept::new();
    let handle = kept.handle();
    assert_eq!(handle.status().expect("it can be asked"), None);
    assert_eq!(handle.down().expect("nothing to stop"), None);

    let first = handle.up().expect("it starts");
    assert!(!first.already_running);
    assert!(is_alive(first.pid));
    query(&first.url, "CREATE DATABASE more").expect("the server obeys");
    query(&first.database_url("more"), "CREATE TABLE t AS SELECT 42 AS n")
        .expect("the server obeys");

    let again = handle.up().expect("it runs");
    assert!(again.already_running);
    assert_eq!((&again.url, again.pid), (&first.url, first.pid));
    assert_eq!(handle.status().expect("it can be asked"), Some(again));

    let stopped = handle.down().expect("it stops").expect("it ran");
    assert_eq!(stopped.pid, first.pid);
    assert!(!is_alive(first.pid));
    assert_eq!(handle.status().expect("it can be asked"), None);
    assert_eq!(handle.down().expect("nothing to stop"), None);

    let second = handle.up().expect("it starts");
    assert!(!second.already_running);
    assert_eq!(second.url, first.url);
    let found = query(&second.database_url("more"), "SELECT n FROM t");
    assert_eq!(found.expect("the server answers"), "42");
}

#[test]
fn only_the_owner_can_read_the_password() {
    let kept = Kept::new();
    let info = kept.handle().up().expect("it starts");
    let path = kept.0.path().join("connection");
    let meta = fs::metadata(&path).expect("it's there");
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    assert_eq!(meta.uid(), fs::metadata(kept.0.path()).expect("it's there").uid());
    let text = fs::read_to_string(&path).expect("it can be read");
    assert_eq!(text.trim(), info.url);
    let log = fs::metadata(&info.log_file).expect("it's there");
    assert_eq!(log.permissions().mode() & 0o077, 0);
}

#[test]
fn several_ups_at_once_start_one_server() {
    let kept = Kept::new();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let handle = kept.handle();
            thread::spawn(move || handle.up().expect("it starts"))
        })
        .collect();
    let infos: Vec<_> =
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    assert_eq!(infos.iter().filter(|info| !info.already_running).count(), 1);
    for info in &infos {
        assert_eq!((&info.url, info.pid), (&infos[0].url, infos[0].pid));
    }
}

#[test]
fn moves_to_another_port_when_its_own_is_taken() {
    let kept = Kept::new();
    let handle = kept.handle();
    let first = handle.up().expect("it starts");
    handle.down().expect("it stops");

    let squatter = TcpListener::bind(("127.0.0.1", first.port)).expect("the port is free");
    let second = handle.up().expect("it starts");
    assert_ne!(second.port, first.port);
    query(&second.url, "SELECT 1").expect("the server answers");
    handle.down().expect("it stops");

    drop(squatter);
    let third = handle.up().expect("it starts");
    assert_eq!(third.url, second.url);
}

#[test]
fn recovers_from_a_crash_and_a_left_over_pid_file() {
    let kept = Kept::new();
    let handle = kept.handle();
    let info = handle.up().expect("it starts");
    let pid_file = info.data_dir.join("postmaster.pid");
    query(&info.url, "CREATE TABLE t AS SELECT 42 AS n").expect("the server obeys");
    let killed = std::process::Command::new("kill")
        .args(["-KILL", &info.pid.to_string()])
        .status()
        .expect("kill runs");
    assert!(killed.success());
    crate::support::eventually("the server is gone", || !is_alive(info.pid));
    assert!(pid_file.exists());
    assert_eq!(handle.status().expect("it can be asked"), None);
    assert_eq!(handle.down().expect("nothing to stop"), None);

    handle.up().expect("it recovers");
    handle.down().expect("it stops");

    // As after a reboot: the process id now belongs to another program, here
    // this one.
    let text = format!(
        "{}\n{}\n1700000000\n{}\n\n127.0.0.1\n 1 1\nready\n",
        std::process::id(),
        info.data_dir.display(),
        info.port
    );
    fs::write(&pid_file, text).expect("it can be written");
    assert_eq!(handle.status().expect("it can be asked"), None);
    assert_eq!(handle.down().expect("nothing to stop"), None);
    let info = handle.up().expect("it starts");
    assert!(!info.already_running);
    let found = query(&info.url, "SELECT n FROM t");
    assert_eq!(found.expect("the server answers"), "42");
}

#[test]
fn an_unfinished_cluster_is_made_anew() {
    let kept = Kept::new();
    let unfinished = kept.0.path().join("unfinished-abc");
    fs::create_dir_all(unfinished.join("data")).expect("it can be made");
    fs::write(unfinished.join("data/PG_VERSION"), "15\n").expect("it can be written");
    let info = kept.handle().up().expect("it starts");
    query(&info.url, "SELECT 1").expect("the server answers");
    assert!(!unfinished.exists());
}

#[test]
fn runs_on_when_its_starter_ends() {
    let kept = Kept::new();
    let output =
        in_own_process("persistent::up_and_end", &[(DIR, &kept.path())]).output().expect("it runs");
    assert!(output.status.success());
    let info = kept.handle().up().expect("it runs");
    assert!(info.already_running);
    query(&info.url, "SELECT 1").expect("the server answers");
}

#[test]
fn a_killed_up_is_in_nobodys_way() {
    for delay in [100, 900] {
        let kept = Kept::new();
        let mut child = in_own_process("persistent::up_and_end", &[(DIR, &kept.path())])
            .spawn()
            .expect("it starts");
        thread::sleep(Duration::from_millis(delay));
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
        let info = kept.handle().up().expect("it starts");
        query(&info.url, "SELECT 1").expect("the server answers");
    }
}

#[test]
#[ignore = "run by the tests above in a process of its own"]
fn up_and_end() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    Persistent::new(Some(dir.as_ref())).expect("a folder will do").up().expect("it starts");
}

#[test]
fn names_the_version_the_data_needs() {
    let kept = Kept::new();
    let data = kept.0.path().join("data");
    fs::create_dir(&data).expect("it can be made");
    fs::write(data.join("PG_VERSION"), "13\n").expect("it can be written");
    let error = kept.handle().up().expect_err("13 is too old");
    assert!(matches!(error, Error::MajorMismatch { wanted: 13, .. }), "{error}");

    let programs = Programs::find_or_obtain(None, &|_| {}).expect("this machine has some");
    let other = if programs.major() == 15 { 16 } else { 15 };
    fs::write(data.join("PG_VERSION"), format!("{other}\n")).expect("it can be written");
    let error =
        kept.handle().programs(programs.clone()).up().expect_err("the given programs don't fit");
    let text = error.to_string();
    assert!(text.contains(&format!("belongs to PostgreSQL {other}")), "{text}");
    assert!(text.contains(programs.version()), "{text}");

    fs::write(data.join("PG_VERSION"), "nonsense").expect("it can be written");
    let error = kept.handle().up().expect_err("that's no version");
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
}

#[test]
fn a_failed_start_shows_the_log() {
    let kept = Kept::new();
    let error =
        kept.handle().setting("shared_buffers", "a lot").up().expect_err("nonsense is refused");
    assert!(error.to_string().contains("shared_buffers"), "{error}");
    // Nothing is lost by it.
    kept.handle().up().expect("it starts");
}
