//! `sqlstreams doctor`.

use serde_json::json;

use crate::support::Bench;

#[test]
fn what_is_wrong_is_told_and_repaired() {
    let bench = Bench::with_orders("1\n2\n3\n");
    assert_eq!(bench.ok(&["doctor"]), "nothing is wrong\n");
    assert_eq!(bench.json(&["doctor"]), json!({"findings": [], "repairs": [], "errors": 0}));

    bench.sql(
        "SELECT setval('sqlstreams.message_log_1_id_seq', 1); DROP FUNCTION sqlstreams.produce_1",
    );
    let ran = bench.run(&["doctor", "--json"]).assert_code(1);
    let told: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(told["errors"], 2);
    assert_eq!(
        (&told["findings"][0]["code"], &told["findings"][0]["stream"]),
        (&json!("sequence_behind"), &json!("orders"))
    );
    let ran = bench.run(&["doctor", "orders"]).assert_code(1);
    assert!(
        ran.text().contains("error: sequence_behind (stream \"orders\")")
            && ran.text().contains("--fix moves the sequence"),
        "{}",
        ran.text()
    );
    let ran = bench.run(&["doctor", "--fix"]).assert_ok();
    assert!(
        ran.text().contains("repaired functions_missing")
            && ran.text().ends_with("nothing is wrong\n"),
        "{}",
        ran.text()
    );
    bench.run_with(&["produce", "orders"], b"4\n").assert_ok();
    assert_eq!(bench.sql("SELECT max(id) FROM sqlstreams.message_log_1"), "4");
    bench.run(&["doctor", "nope"]).assert_error(3, &["no stream nope"]);
}

#[test]
fn what_cannot_be_repaired_stays() {
    let bench = Bench::with_orders("");
    bench.ok(&["group", "create", "orders", "g"]);
    bench.sql("DELETE FROM sqlstreams.consumer_group_cursor_1; UPDATE sqlstreams.installation SET timeline = 9");
    let ran = bench.run(&["doctor", "--fix", "--json"]).assert_code(1);
    let told: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(
        (&told["repairs"][0]["code"], &told["findings"][0]["code"]),
        (&json!("restored"), &json!("cursor_missing"))
    );
    bench.run(&["group", "drop", "orders", "g"]).assert_error(2, &["whose cursor is missing"]);
    assert_eq!(
        bench.ok(&["group", "drop", "orders", "g", "--yes"]),
        "dropped group \"g\" of stream \"orders\"\n"
    );
    assert_eq!(bench.ok(&["doctor"]), "nothing is wrong\n");
    // A warning is no failure.
    bench.sql("DROP TABLE sqlstreams.consumer_group CASCADE; ");
    let bench = Bench::with_orders("");
    bench.sql("UPDATE sqlstreams.installation SET timeline = 9");
    let ran = bench.run(&["doctor"]).assert_ok();
    assert!(
        ran.text().starts_with("warning: restored: the server is on timeline 1, and was on 9"),
        "{}",
        ran.text()
    );
}

#[test]
fn a_schema_that_is_missing_is_installed() {
    let bench = Bench::new();
    let ran = bench.run(&["doctor"]).assert_code(1);
    assert!(ran.text().contains("schema_missing"), "{}", ran.text());
    bench.run(&["doctor", "--fix"]).assert_ok();
    bench.ok(&["stream", "create", "orders"]);
    let mut nowhere = bench.command(&["doctor"]);
    nowhere.env("DATABASE_URL", "postgres://127.0.0.1:1/x");
    crate::support::run(&mut nowhere, b"").assert_error(4, &["could not connect"]);
}
