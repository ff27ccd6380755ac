//! Consuming by printing.

use std::io::{BufRead, BufReader, Read};
use std::time::Instant;

use serde_json::{Value, json};

use crate::support::{Bench, LEASE, sorted};

fn caught_up(bench: &Bench, group: &str, more: &[&str]) -> String {
    let mut args = vec!["consume", "orders", "--group", group, "--until-caught-up", "-c", "1"];
    args.extend(more);
    bench.ok(&args)
}

#[test]
fn each_group_gets_everything_once() {
    let bench = Bench::with_orders("1\n2\n3\n");
    assert_eq!(caught_up(&bench, "a", &[]), "1\n2\n3\n");
    assert_eq!(caught_up(&bench, "a", &[]), "");
    assert_eq!(caught_up(&bench, "b", &[]), "1\n2\n3\n");
    bench.run_with(&["produce", "orders"], b"4\n").assert_ok();
    assert_eq!(caught_up(&bench, "a", &[]), "4\n");
}

#[test]
fn a_group_starts_where_it_is_told() {
    let bench = Bench::with_orders("1\n2\n3\n");
    let between = bench.sql("SELECT pg_sleep(0.05); SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')");
    let between = match between.is_empty() {
        true => bench.sql(
            "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')",
        ),
        false => between,
    };
    bench.run_with(&["produce", "orders"], b"4\n5\n").assert_ok();
    assert_eq!(caught_up(&bench, "beginning", &["--from", "beginning"]), "1\n2\n3\n4\n5\n");
    assert_eq!(caught_up(&bench, "latest", &["--from", "latest"]), "");
    assert_eq!(caught_up(&bench, "id", &["--from", "5"]), "5\n");
    assert_eq!(caught_up(&bench, "time", &["--from", &between]), "4\n5\n");
    assert_eq!(caught_up(&bench, "ago", &["--from", "1h ago"]), "1\n2\n3\n4\n5\n");

    let ran = bench.run(&["consume", "orders", "-g", "latest", "--from", "1", "--until-caught-up"]);
    let ran = ran.assert_ok();
    assert_eq!(ran.text(), "");
    assert!(ran.stderr.contains("--from is for new groups"), "{}", ran.stderr);
    bench
        .run(&["consume", "orders", "-g", "x", "--from", "soon"])
        .assert_error(2, &["--from", "beginning, latest"]);
}

#[test]
fn json_lines_tell_everything() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "orders"]);
    bench
        .run_with(&["produce", "orders", "--key-field", "k"], b"{\"k\": 1,  \"n\": 1.00}\n")
        .assert_ok();
    bench.sql("SELECT 1");
    let ran =
        bench.run(&["consume", "orders", "-g", "g", "--until-caught-up", "--json"]).assert_ok();
    assert!(ran.text().contains("\"payload\":{\"k\": 1,  \"n\": 1.00}"), "{}", ran.text());
    let message: Value = serde_json::from_str(&ran.text()).unwrap();
    assert_eq!(
        (&message["id"], &message["key"], &message["attempt"], &message["headers"]),
        (&json!(1), &json!("1"), &json!(1), &json!({}))
    );
    assert!(message["produced_at"].as_str().unwrap().ends_with('Z'));
    let summary: Value = serde_json::from_str(ran.stderr.trim()).unwrap();
    assert_eq!(summary["summary"]["handled"], 1);

    bench.ok(&["stream", "create", "raw", "--payload-type", "bytea"]);
    bench.run_with(&["produce", "raw"], b"\x00\xff\n").assert_ok();
    let ran = bench.run(&["consume", "raw", "-g", "g", "--until-caught-up", "--json"]).assert_ok();
    assert_eq!(serde_json::from_str::<Value>(&ran.text()).unwrap()["payload"], "\\x00ff");
}

#[test]
fn payloads_with_line_feeds_are_printed_as_they_are() {
    let bench = Bench::with_orders("");
    let id = bench.json(&["stream", "show", "orders"])["id"].clone();
    bench.sql(&format!(
        "INSERT INTO sqlstreams.message_log_{id} (payload) VALUES (E'{{\\n  \"a\": 1\\n}}')"
    ));
    assert_eq!(caught_up(&bench, "g", &[]), "{\n  \"a\": 1\n}\n");
    let line = caught_up(&bench, "h", &["--json"]);
    assert_eq!(line.lines().count(), 1);
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["payload"], json!({"a": 1}));
}

#[test]
fn whoever_closes_the_pipe_loses_nothing_for_the_next() {
    let lines: String = (0..20_000).map(|n| format!("{{\"n\":{n}}}\n")).collect();
    let bench = Bench::with_orders(&lines);
    let mut child = bench.start(&["consume", "orders", "-g", "g"]);
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut seen = Vec::new();
    for _ in 0..10 {
        reader.read_until(b'\n', &mut seen).unwrap();
    }
    // What lies in the pipe was written, and is lost by us who close it: as with `head`, it counts as printed.
    seen.extend_from_slice(reader.buffer());
    drop(reader);
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{stderr}");
    assert!(!stderr.contains("error") && !stderr.contains("panicked"), "{stderr}");

    let status = bench.json(&["group", "show", "orders", "g"]);
    assert_eq!((&status["inflight"], &status["ready"]), (&json!(0), &json!(0)), "{status}");
    let begun = Instant::now();
    let rest = bench.run(&["consume", "orders", "-g", "g", "--until-caught-up"]).assert_ok();
    assert!(begun.elapsed() < LEASE, "what was not printed was not handed back");
    // A pipe holds 64 KiB: so much may be gone, and no more.
    let most_lost = 64 * 1024 + 16;
    assert!(seen.len() + rest.stdout.len() + most_lost >= lines.len(), "lost too much");
    assert!(rest.stdout.len() < lines.len(), "what was handled came again");
}

#[test]
fn two_consumers_share_a_group() {
    let lines: String = (0..5_000).map(|n| format!("{n}\n")).collect();
    let bench = Bench::with_orders(&lines);
    let args = ["consume", "orders", "-g", "g", "--until-caught-up"];
    let children = [bench.start(&args), bench.start(&args)];
    let mut all = Vec::new();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        all.extend(output.stdout);
    }
    assert_eq!(sorted(&all), sorted(lines.as_bytes()));
}

#[test]
fn settings_out_of_range_are_refused() {
    let bench = Bench::with_orders("1\n");
    let refused = |more: &[&str], words: &[&str]| {
        let args: Vec<&str> =
            ["consume", "orders", "-g", "g"].into_iter().chain(more.iter().copied()).collect();
        bench.run(&args).assert_error(2, words);
    };
    refused(&["--lease", "15"], &["--lease", "15s"]);
    refused(&["--lease", "1ms"], &["lease", "100 ms"]);
    refused(&["--timeout", "0s"], &["--timeout"]);
    refused(&["--concurrency", "0"], &["--concurrency", "at least 1"]);
    refused(&["--max-attempts", "0"], &["--max-attempts"]);
    refused(&["--until-caught"], &["--until-caught-up"]);
    bench.run(&["consume", "nope", "-g", "g"]).assert_error(3, &["no stream \"nope\""]);
    // A stream that was mistyped gets no group, and one whose settings are wrong neither.
    assert_eq!(bench.json(&["group", "list", "orders"]), json!([]));
}
