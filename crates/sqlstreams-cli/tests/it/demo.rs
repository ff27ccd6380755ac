//! The demo: facts that hold, on a given database and on its own, and nothing left behind.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Bench, eventually, program, run, signal};

/// A place for the demo's server, which other accounts can enter.
fn place() -> TempDir {
    let place = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(place.path(), Permissions::from_mode(0o755)).unwrap();
    place
}

/// The demo with a server of its own, in that place.
fn alone(place: &TempDir, args: &[&str]) -> Command {
    let args: Vec<&str> = ["demo", "--messages", "2000"].iter().chain(args).copied().collect();
    let mut command = program(&args);
    command.env("TMPDIR", place.path());
    command
}

fn is_empty(place: &TempDir) -> bool {
    fs::read_dir(place.path()).unwrap().next().is_none()
}

#[track_caller]
fn assert_facts(facts: &Value, throw_away: bool) {
    assert_eq!(facts["postgresql"]["throw_away"], throw_away);
    assert_eq!(facts["produced"]["messages"], 2000);
    let [receipts, payments] = facts["groups"].as_array().unwrap().as_slice() else {
        panic!("not two groups: {facts:#}");
    };
    assert_eq!(receipts["handled"], 2000);
    assert_eq!(receipts["state_rows"]["cursor"], 1);
    assert_eq!(receipts["state_rows"]["exceptions"], 0);
    let dead = payments["dead"].as_u64().unwrap();
    assert!((1..30).contains(&dead), "{payments}");
    assert_eq!(payments["handled"], 2000 - dead);
    assert_eq!(payments["state_rows"]["exceptions"], dead);
    assert_eq!(facts["dead_letters"]["count"], dead);
    let errors = facts["dead_letters"]["errors"].as_array().unwrap();
    assert_eq!(errors.iter().map(|e| e["count"].as_u64().unwrap()).sum::<u64>(), dead);
    assert_eq!(facts["redrive"]["redriven"], dead);
    assert_eq!(facts["redrive"]["dead_after"], 0);
    assert_eq!(facts["replay"]["messages"], 2000);
    assert_eq!(facts["replay"]["revenue"], facts["replay"]["revenue_by_sql"]);
    assert_eq!(facts["transaction"]["rolled_back"]["rows"], 0);
    assert_eq!(facts["transaction"]["rolled_back"]["messages"], 0);
    assert_eq!(facts["transaction"]["committed"]["rows"], 1);
    assert_eq!(facts["transaction"]["committed"]["messages"], 1);
    assert!(facts["checks"].as_u64().unwrap() > 30);
}

#[test]
fn on_a_given_database_it_leaves_no_stream() {
    let bench = Bench::new();
    assert_facts(&bench.json(&["demo", "--messages", "2000"]), false);
    assert_eq!(bench.sql("SELECT count(*) FROM sqlstreams.stream"), "0");
}

#[test]
fn what_is_kept_stays() {
    let bench = Bench::new();
    let facts = bench.json(&["demo", "--messages", "10", "--keep"]);
    let name = facts["stream"].as_str().unwrap();
    assert_eq!(bench.sql("SELECT name FROM sqlstreams.stream"), name);
    let place = place();
    run(&mut alone(&place, &["--keep"]), b"").assert_error(2, &["--keep"]);
}

#[test]
fn without_a_database_it_brings_its_own_and_leaves_nothing() {
    let place = place();
    let ran = run(&mut alone(&place, &["--json"]), b"").assert_ok();
    assert_facts(&serde_json::from_slice(&ran.stdout).unwrap(), true);
    assert!(is_empty(&place));
}

#[test]
fn the_report_is_plain_text_that_fits() {
    let place = place();
    let text = run(&mut alone(&place, &[]), b"").assert_ok().text();
    assert!(text.contains("checks held"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "too long: {line}");
    }
}

#[test]
fn interrupted_it_leaves_nothing() {
    let place = place();
    let mut child = alone(&place, &[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("it has begun", || !is_empty(&place));
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // What a server that was just being started leaves is its watchdog's to clean up.
    eventually("nothing is left", || is_empty(&place));

    let bench = Bench::new();
    let mut child = bench.start(&["demo", "--messages", "1000000"]);
    let streams = "SELECT count(*) FROM pg_class WHERE relname LIKE 'message_log_%_seq'";
    eventually("there is a stream", || bench.sql(streams) == "1");
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(bench.sql(streams), "0");
}

#[test]
fn killed_it_leaves_nothing() {
    let place = place();
    let mut child = alone(&place, &[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("it has begun", || !is_empty(&place));
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("nothing is left", || is_empty(&place));
}
