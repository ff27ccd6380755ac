//! Streams, groups, and the schema.

use crate::support::{Bench, run};

#[test]
fn the_schema_is_installed_and_found_up_to_date() {
    let bench = Bench::new();
    assert!(bench.ok(&["migrate"]).contains("installed version"));
    assert!(bench.ok(&["migrate"]).contains("up to date"));
    let report = bench.json(&["migrate"]);
    assert_eq!(report["changed"], false);
    assert_eq!(report["from"], report["to"]);
    let other = bench.json(&["migrate", "--schema", "other \"one\""]);
    assert_eq!((&other["changed"], &other["from"]), (&true.into(), &serde_json::Value::Null));
}

#[test]
fn looking_installs_nothing() {
    let bench = Bench::new();
    bench.run(&["stream", "list"]).assert_error(4, &["not installed", "sqlstreams migrate"]);
    assert_eq!(bench.sql("SELECT to_regnamespace('sqlstreams') IS NULL"), "t");
}

#[test]
fn a_stream_is_created_listed_shown_and_dropped() {
    let bench = Bench::new();
    let created = bench.json(&["stream", "create", "orders"]);
    assert_eq!((&created["name"], &created["payload_type"]), (&"orders".into(), &"json".into()));
    bench.ok(&["stream", "create", "logs", "--payload-type", "text", "--partition-size", "5000"]);
    bench.run_with(&["produce", "orders"], b"1\n2\n3\n").assert_ok();
    bench.ok(&["consume", "orders", "--group", "g", "--until-caught-up"]);

    let listed = bench.json(&["stream", "list"]);
    let names: Vec<&str> =
        listed.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["logs", "orders"]);
    assert_eq!(listed[0]["partition_size"], 5000);
    assert_eq!((&listed[1]["head"], &listed[1]["groups"]), (&3.into(), &1.into()));
    assert!(bench.ok(&["stream", "list"]).starts_with("NAME"));

    let shown = bench.json(&["stream", "show", "orders"]);
    assert_eq!(shown["head"], 3);
    assert_eq!(shown["groups"][0]["group"], "g");
    assert!(bench.ok(&["stream", "show", "orders"]).contains("message_log_"));

    bench.run(&["stream", "drop", "orders"]).assert_error(2, &["this would drop", "--yes"]);
    assert_eq!(bench.json(&["stream", "list"]).as_array().unwrap().len(), 2);
    assert_eq!(bench.json(&["stream", "drop", "orders", "--yes"])["dropped"], "orders");
    bench.run(&["stream", "show", "orders"]).assert_error(3, &["no stream \"orders\"", "\"logs\""]);
}

#[test]
fn a_stream_that_exists_is_not_created_again() {
    let bench = Bench::with_orders("");
    bench.run(&["stream", "create", "orders"]).assert_error(1, &["exists"]);
    let ran = bench.run(&["stream", "create", "orders", "--json"]).assert_code(1);
    assert_eq!(ran.error()["code"], "stream_exists");
    bench
        .run(&["stream", "create", "x", "--payload-type", "xml"])
        .assert_error(2, &["choose json, jsonb, text or bytea"]);
    bench.run(&["stream", "create", "x", "--partition-size", "1"]).assert_error(2, &["partition"]);
}

#[test]
fn groups_are_listed_shown_and_dropped() {
    let bench = Bench::with_orders("1\n2\n3\n");
    assert!(bench.ok(&["group", "list", "orders"]).contains("no groups yet"));
    bench.ok(&["consume", "orders", "-g", "a", "--until-caught-up"]);
    bench.ok(&["consume", "orders", "-g", "b", "--from", "latest", "--until-caught-up"]);
    bench.run_with(&["produce", "orders"], b"4\n").assert_ok();

    let groups = bench.json(&["group", "list", "orders"]);
    assert_eq!(groups.as_array().unwrap().len(), 2);
    let shown = bench.json(&["group", "show", "orders", "a"]);
    assert_eq!(shown, groups[0]);
    assert_eq!(
        (&shown["claimed"], &shown["lag"], &shown["dead"]),
        (&3.into(), &1.into(), &0.into())
    );
    assert!(bench.ok(&["group", "show", "orders", "a"]).starts_with("GROUP"));

    bench
        .run(&["group", "show", "orders", "c"])
        .assert_error(3, &["no group \"c\"", "\"a\", \"b\""]);
    bench.run(&["group", "list", "nope"]).assert_error(3, &["no stream \"nope\"", "\"orders\""]);
    bench.run(&["group", "drop", "orders", "a"]).assert_error(2, &["--yes"]);
    bench.ok(&["group", "drop", "orders", "a", "--yes"]);
    assert_eq!(bench.json(&["group", "list", "orders"]).as_array().unwrap().len(), 1);
}

#[test]
fn schemas_are_apart() {
    let bench = Bench::with_orders("");
    let mut there = bench.command(&["stream", "create", "elsewhere"]);
    run(there.env("SQLSTREAMS_SCHEMA", "weird \"schema\"; --"), b"").assert_ok();
    let names = bench.json(&["stream", "list", "--schema", "weird \"schema\"; --"]);
    assert_eq!(names[0]["name"], "elsewhere");
    assert_eq!(bench.json(&["stream", "list"])[0]["name"], "orders");
}
