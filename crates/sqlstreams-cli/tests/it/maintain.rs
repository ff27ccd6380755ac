//! The upkeep on the command line.

use std::io::{BufRead, BufReader};

use rustix::process::Signal;
use serde_json::json;

use crate::support::{Bench, eventually, signal, sql};

#[test]
fn the_upkeep_is_done_once_and_shown() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "orders", "--partition-size", "1000"]);
    assert!(bench.ok(&["maintain", "status"]).contains("nobody does it"));
    let set = "SELECT setval('sqlstreams.message_log_1_id_seq', 2500)";
    let seen = "UPDATE sqlstreams.stream_pace SET head = 2500";
    sql(&bench.url, &format!("{set}; {seen}"));
    let done = bench.json(&["maintain", "--once"]);
    assert_eq!(done["held"], true);
    let steps: Vec<_> = done["steps"].as_array().unwrap().iter().map(|s| &s["step"]).collect();
    assert_eq!(steps, [&json!("partitions"), &json!("seal")], "{done}");
    assert_eq!(
        (&done["steps"][0]["stream"], &done["steps"][0]["error"]),
        (&json!("orders"), &json!(null))
    );
    assert_eq!(bench.ok(&["maintain", "--once"]), "0 steps done\n");
    let shown = bench.ok(&["maintain", "status"]);
    assert!(shown.contains("STEP") && shown.contains("partitions"), "{shown}");
    let status = bench.json(&["maintain", "status"]);
    assert_eq!((&status["holder"], &status["failures"]), (&json!(null), &json!([])), "{status}");
    assert_eq!(status["steps"][0]["runs"], 1, "{status}");

    // Somebody else is at it; and something fails.
    let held =
        "SELECT * FROM sqlstreams.hold_maintenance(gen_random_uuid(), 'another', '1 minute')";
    let failed = "SELECT sqlstreams.record_step('partitions', 1, now(), 'no room')";
    sql(&bench.url, &format!("{held}; {failed}"));
    assert_eq!(bench.json(&["maintain", "--once"]), json!({ "held": false, "steps": [] }));
    assert!(bench.ok(&["maintain", "--once"]).contains("another process"));
    let shown = bench.ok(&["maintain", "status"]);
    assert!(shown.contains("done by another"), "{shown}");
    assert!(shown.contains("partitions of stream \"orders\" failed 1 time"), "{shown}");
    assert_eq!(bench.json(&["maintain", "status"])["failures"][0]["error"], "no room");
}

#[test]
fn the_upkeep_is_done_until_it_is_stopped() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "orders", "--partition-size", "1000"]);
    let mut child = bench.start(&["maintain", "--json"]);
    let set = "SELECT setval('sqlstreams.message_log_1_id_seq', 2500)";
    sql(&bench.url, set);
    let mut line = String::new();
    // Kept open: whoever cannot print any more ends.
    let mut steps = BufReader::new(child.stdout.take().unwrap());
    steps.read_line(&mut line).unwrap();
    assert!(line.contains("\"partitions\""), "{line}");
    eventually("it is shown", || bench.ok(&["maintain", "status"]).contains("done by process"));
    signal(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(bench.ok(&["maintain", "status"]).contains("nobody does it"));
}

#[test]
fn groups_may_expire() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "orders"]);
    bench.ok(&["group", "create", "orders", "g"]);
    assert!(bench.ok(&["stream", "show", "orders"]).contains("groups expire never"));
    let alter = |after| ["stream", "alter", "orders", "--expire-groups-after", after];
    assert!(bench.ok(&alter("30d")).contains("nobody has consumed them for"));
    assert_eq!(bench.json(&["stream", "show", "orders"])["group_expiry_seconds"], 2_592_000.0);
    bench.run(&alter("1m")).assert_error(2, &["1 hour"]);
    bench.ok(&["maintain", "--once"]);
    assert_eq!(bench.json(&["group", "show", "orders", "g"])["expires_at"], json!(null));
    sql(&bench.url, "UPDATE sqlstreams.group_watch SET warned_at = now()");
    assert!(bench.ok(&["group", "show", "orders", "g"]).contains("nobody has consumed it"));
    assert!(bench.ok(&["group", "list", "orders"]).contains("expires 20"));
    assert!(bench.ok(&alter("never")).contains("do not expire"));
    assert_eq!(bench.json(&["stream", "show", "orders"])["group_expiry_seconds"], json!(null));
}
