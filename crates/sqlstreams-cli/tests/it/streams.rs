//! Streams, groups, and the schema.

use serde_json::Value;

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

#[test]
fn how_long_messages_are_kept_is_set_shown_and_done() {
    let bench = Bench::new();
    let created = bench.ok(&[
        "stream",
        "create",
        "clicks",
        "--partition-size",
        "1000",
        "--retain-for",
        "7d",
        "--retain-bytes",
        "50GB",
    ]);
    assert_eq!(created, "created stream \"clicks\" for json\n");
    let shown = bench.ok(&["stream", "show", "clicks"]);
    assert!(shown.contains("kept       7d, 50,000,000,000 bytes, from id 1 on\n"), "{shown}");
    let few = bench
        .run(&[
            "stream",
            "alter",
            "clicks",
            "--retain-bytes",
            "none",
            "--retain-count",
            "10",
            "--retain-dead-for",
            "90d",
        ])
        .assert_ok();
    assert_eq!(few.text(), "stream \"clicks\" keeps messages: 7d, 10 ids; dead letters 90d\n");
    assert!(few.stderr.contains("up to 1,010 are kept"), "{}", few.stderr);
    let altered = bench.json(&[
        "stream",
        "alter",
        "clicks",
        "--drop-unread",
        "on",
        "--retain-until-resolved",
        "on",
        "--retain-for",
        "none",
    ]);
    let kept = &altered["retention"];
    assert_eq!((&kept["retain_for_seconds"], &kept["retain_count"]), (&Value::Null, &10.into()));
    assert_eq!(
        (&kept["drop_unread"], &kept["retain_until_resolved"]),
        (&true.into(), &true.into())
    );
    assert_eq!(altered["first_id"], 1);
    assert!(
        bench
            .ok(&["stream", "list"])
            .contains("10 ids, until resolved, unread or not; dead letters 90d")
    );
    for wrong in [
        ["--retain-for", "7"],
        ["--retain-bytes", "10XB"],
        ["--retain-count", "0"],
        ["--drop-unread", "yes"],
        ["--retain-for", "500ms"],
    ] {
        bench.run(&["stream", "alter", "clicks", wrong[0], wrong[1]]).assert_code(2);
    }

    // A group that has read nothing holds them, until unread ones go, too.
    bench.ok(&[
        "stream",
        "alter",
        "clicks",
        "--drop-unread",
        "off",
        "--retain-until-resolved",
        "off",
    ]);
    bench.sql("INSERT INTO sqlstreams.message_log_1 (payload) SELECT to_json(n) FROM generate_series(1, 2500) AS n");
    bench.ok(&["group", "create", "clicks", "slow"]);
    bench.sql("SELECT sqlstreams.seal_partitions(1); SELECT pg_sleep(0.1); SELECT sqlstreams.seal_partitions(1)");
    bench.sql("UPDATE sqlstreams.log_partition SET sealed_at = sealed_at - interval '1 day'");
    let held = bench.run(&["stream", "retain", "clicks"]).assert_ok();
    assert!(held.text().starts_with("0 partitions and 0 dead letters"), "{}", held.text());
    assert!(
        held.stderr.contains("by group slow, which has resolved up to id 0"),
        "{}",
        held.stderr
    );
    let hold = &bench.json(&["stream", "show", "clicks"])["retention"]["hold"];
    assert_eq!((&hold["reason"], &hold["group"]), (&"group".into(), &"slow".into()));
    assert!(bench.ok(&["stream", "show", "clicks"]).contains("held up    since"));
    assert!(bench.ok(&["stream", "list"]).contains("dead letters 90d *"));
    bench.ok(&["stream", "alter", "clicks", "--drop-unread", "on"]);
    let done = bench.json(&["stream", "retain", "clicks"]);
    assert_eq!(
        (&done["partitions"], &done["first_id"], &done["hold"]),
        (&2.into(), &2_000.into(), &Value::Null)
    );
    assert_eq!(bench.json(&["group", "show", "clicks", "slow"])["dropped"], 1_999);
}

#[test]
fn retention_that_another_keeps_from_its_work_says_who_that_is() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "orders", "--partition-size", "1000", "--retain-for", "1h"]);
    bench.sql("INSERT INTO sqlstreams.message_log_1 (payload) SELECT to_json(n) FROM generate_series(1, 1500) AS n");
    bench.sql("SELECT sqlstreams.seal_partitions(1); SELECT pg_sleep(0.1); SELECT sqlstreams.seal_partitions(1)");
    // Nothing is old enough, and nobody is in the way.
    let free = bench.json(&["stream", "retain", "orders"]);
    assert_eq!((&free["partitions"], &free["busy"]), (&0.into(), &Value::Null));
    bench.sql("UPDATE sqlstreams.log_partition SET sealed_at = sealed_at - interval '1 day'");
    let other = bench.start_sql(
        "SET application_name = 'nightly'; BEGIN; SELECT FROM sqlstreams.stream FOR UPDATE",
    );
    let ran = bench.run(&["stream", "retain", "orders"]);
    let ran = ran.assert_error(1, &["in use by process", "nightly", "since"]);
    assert!(ran.text().starts_with("0 partitions"), "{}", ran.text());
    assert!(
        ran.stderr.contains("hint: ") && ran.stderr.contains("run this again"),
        "{}",
        ran.stderr
    );
    let ran = bench.run(&["stream", "retain", "orders", "--json"]).assert_code(1);
    let done: Value = serde_json::from_str(&ran.text()).unwrap();
    assert!(done["busy"]["by"].as_str().unwrap().contains("nightly"), "{done}");
    assert!(done["busy"]["since"].is_string(), "{done}");
    assert_eq!(ran.error()["code"], "stream_busy");
    assert_eq!(ran.error()["by"], done["busy"]["by"]);
    other.end();
    let done = bench.json(&["stream", "retain", "orders"]);
    assert_eq!((&done["partitions"], &done["busy"]), (&1.into(), &Value::Null));
}

#[test]
fn what_is_made_of_a_partition_is_named_by_the_status_of_the_upkeep() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "clicks", "--partition-size", "1000", "--retain-for", "1h"]);
    bench.sql("INSERT INTO sqlstreams.message_log_1 (payload) SELECT to_json(n) FROM generate_series(1, 1500) AS n");
    bench.sql("SELECT sqlstreams.seal_partitions(1); SELECT pg_sleep(0.1); SELECT sqlstreams.seal_partitions(1)");
    bench.sql("UPDATE sqlstreams.log_partition SET sealed_at = sealed_at - interval '1 day'");
    bench.sql("CREATE VIEW mine AS SELECT * FROM sqlstreams.message_log_1_p0");
    let told = "view public.mine depends on table message_log_1_p0";
    crate::support::eventually("it cannot go", || {
        let ran = bench.run(&["stream", "retain", "clicks"]).assert_ok();
        ran.stderr.contains(told)
    });
    let status = bench.ok(&["maintain", "status"]);
    assert!(status.contains("retention of stream \"clicks\" is held up since"), "{status}");
    assert!(status.contains(told), "{status}");
    let status = bench.json(&["maintain", "status"]);
    let hold = &status["holds"][0];
    assert_eq!((&hold["stream"], &hold["reason"]), (&"clicks".into(), &"depends".into()));
    bench.sql("DROP VIEW mine");
    assert_eq!(bench.json(&["stream", "retain", "clicks"])["partitions"], 1);
    assert_eq!(bench.json(&["maintain", "status"])["holds"], serde_json::json!([]));
}
