//! Signals.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use crate::support::{Bench, LEASE, eventually, signal, sorted};

#[test]
fn an_interrupted_consumer_loses_nothing_and_repeats_nothing() {
    let lines: String = (0..50_000).map(|n| format!("{{\"n\":{n}}}\n")).collect();
    let bench = Bench::with_orders(&lines);
    let mut seen = Vec::new();
    for (round, code) in [(0, 0), (1, 130)] {
        let mut args = vec!["consume", "orders", "-g", "g"];
        if round == 1 {
            args.push("--until-caught-up");
        }
        let mut child = bench.start(&args);
        let mut reader = BufReader::new(child.stdout.take().unwrap());
        for _ in 0..1_000 {
            reader.read_until(b'\n', &mut seen).unwrap();
        }
        signal(&child, Signal::INT);
        reader.read_to_end(&mut seen).unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains("handled"), "{stderr}");
        assert!(seen.len() < lines.len(), "it was done before the signal came");
    }
    let status = bench.json(&["group", "show", "orders", "g"]);
    assert_eq!((&status["ready"], &status["inflight"]), (&json!(0), &json!(0)), "{status}");
    seen.extend(
        bench.run(&["consume", "orders", "-g", "g", "--until-caught-up"]).assert_ok().stdout,
    );
    assert_eq!(sorted(&seen), sorted(lines.as_bytes()));
}

#[test]
fn a_running_command_is_let_finish() {
    let bench = Bench::with_orders("1\n2\n");
    let dir = tempfile::tempdir().unwrap();
    let (started, finished) = (dir.path().join("started"), dir.path().join("finished"));
    let script = format!("touch {}; sleep 1; touch {}", started.display(), finished.display());
    let child = bench.start(&["consume", "orders", "-g", "g", "--exec", "sh", "-c", &script]);
    eventually("the command runs", || started.exists());
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(finished.exists(), "the command was cut short");
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 handled"));
    assert_eq!(bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up"]), "2\n");
}

#[test]
fn the_second_signal_ends_what_runs() {
    let bench = Bench::with_orders("1\n");
    let dir = tempfile::tempdir().unwrap();
    let started = dir.path().join("started");
    let script = format!("touch {}; exec sleep 60", started.display());
    let child = bench.start(&["consume", "orders", "-g", "g", "--exec", "sh", "-c", &script]);
    eventually("the command runs", || started.exists());
    let begun = Instant::now();
    signal(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(200));
    signal(&child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5), "it took {:?}", begun.elapsed());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    // Handed back at once, with no attempt spent.
    let begun = Instant::now();
    let again = bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up", "--json"]);
    assert!(begun.elapsed() < LEASE, "the message was not handed back");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&again).unwrap()["attempt"], 1);
}

#[test]
fn an_interrupted_producer_tells_how_far_it_came() {
    let bench = Bench::with_orders("");
    let mut child = bench
        .command(&["produce", "orders", "--batch", "10", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let lines: String = (0..95).map(|n| format!("{n}\n")).collect();
    stdin.write_all(lines.as_bytes()).unwrap();
    eventually("everything that came is stored", || {
        bench.json(&["stream", "show", "orders"])["head"] == 95
    });
    signal(&child, Signal::INT);
    // The input stays open: it has to end all the same.
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(stdin);
    let told: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&told["stored"], &told["next_line"]), (&json!(95), &json!(96)));
}
