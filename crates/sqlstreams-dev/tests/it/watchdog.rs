//! What becomes of a cluster whose process dies.

use std::env;
use std::io::{BufRead, BufReader, Read, stdin};
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use sqlstreams_dev::Cluster;

use crate::support::{eventually, in_own_process, is_alive, is_empty, open_folder};

const BASE: &str = "SQLSTREAMS_TEST_BASE";
const THEN: &str = "SQLSTREAMS_TEST_THEN";

/// Starts a process that holds a cluster in a folder.
fn holder(base: &Path, then: &str) -> (Child, impl Iterator<Item = String>) {
    let base = base.to_str().expect("it's plain text");
    let mut child =
        in_own_process("watchdog::hold", &[(BASE, base), (THEN, then)]).spawn().expect("it starts");
    let output = child.stdout.take().expect("it's a pipe");
    let lines = BufReader::new(output).lines().map_while(Result::ok);
    (child, lines)
}

/// Reads lines up to one with this in it, and gives the rest of that line.
fn read_to(lines: &mut impl Iterator<Item = String>, mark: &str) -> String {
    lines.find_map(|line| Some(line.split_once(mark)?.1.to_owned())).expect("the line comes")
}

/// No process with this folder in its command line is left.
fn unused(folder: &Path) -> bool {
    let output = Command::new("ps").args(["-e", "-ww", "-o", "args="]).output().expect("ps runs");
    let folder = folder.to_str().expect("it's plain text");
    !String::from_utf8_lossy(&output.stdout).contains(folder)
}

#[test]
fn gone_after_the_process_is_killed() {
    for then in ["hold", "restart"] {
        let base = open_folder();
        let (mut child, mut lines) = holder(base.path(), then);
        let pid = read_to(&mut lines, "HOLDING ").parse().expect("a process id");
        assert!(is_alive(pid));
        assert!(!is_empty(base.path()));

        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
        eventually("the folder is gone", || is_empty(base.path()));
        eventually("the server is gone", || !is_alive(pid));
        eventually("all processes are gone", || unused(base.path()));
    }
}

#[test]
fn gone_after_the_server_and_the_process_are_killed() {
    let base = open_folder();
    let (mut child, mut lines) = holder(base.path(), "crash");
    read_to(&mut lines, "HOLDING ");
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
    eventually("the folder is gone", || is_empty(base.path()));
    eventually("all processes are gone", || unused(base.path()));
}

#[test]
fn gone_after_an_exit_without_drop() {
    let base = open_folder();
    let (mut child, mut lines) = holder(base.path(), "exit");
    let pid = read_to(&mut lines, "HOLDING ").parse().expect("a process id");
    child.wait().expect("it ends");
    eventually("the folder is gone", || is_empty(base.path()));
    eventually("the server is gone", || !is_alive(pid));
}

#[test]
fn gone_after_the_process_is_killed_while_starting() {
    for delay in [0, 100, 500, 1500] {
        let base = open_folder();
        let (mut child, mut lines) = holder(base.path(), "hold");
        read_to(&mut lines, "Starting a private PostgreSQL");
        sleep(Duration::from_millis(delay));
        child.kill().expect("it can be killed");
        child.wait().expect("it ends");
        eventually("the folder is gone", || is_empty(base.path()));
        eventually("all processes are gone", || unused(base.path()));
    }
}

#[test]
#[ignore = "run by the tests above in a process of its own"]
fn hold() {
    let Some(base) = env::var_os(BASE) else { return };
    let cluster = Cluster::builder()
        .base_dir(base)
        .durable(false)
        .progress(&|line| println!("{line}"))
        .start()
        .expect("a cluster starts");
    let then = env::var(THEN).unwrap_or_default();
    if then == "restart" || then == "crash" {
        cluster.kill().expect("it dies");
    }
    if then == "restart" {
        cluster.start_again().expect("it comes back");
    }
    println!("HOLDING {}", cluster.pid().unwrap_or_default());
    if then == "exit" {
        std::process::exit(0);
    }
    // Until the test kills this process, or dies itself.
    let _ = stdin().read(&mut [0]);
}
