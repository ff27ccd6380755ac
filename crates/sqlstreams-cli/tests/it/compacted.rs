//! Compacted streams on the command line.

use serde_json::json;

use crate::support::Bench;

#[test]
fn current_values_are_shown_listed_and_removed() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "prices", "--compacted"]);
    assert_eq!(bench.json(&["stream", "show", "prices"])["compacted"], true);
    assert!(bench.ok(&["stream", "show", "prices"]).contains("compacted  yes"));
    assert!(bench.ok(&["message", "current", "prices"]).contains("no current values"));
    let lines = "{\"of\":\"b\",\"n\":1}\n{\"of\":\"a\",\"n\":2}\n{\"of\":\"b\",\"n\":3}\n";
    bench.run_with(&["produce", "prices", "--key-field", "of"], lines.as_bytes()).assert_ok();
    bench.run_with(&["produce", "prices"], b"1\n").assert_error(1, &["has no key"]);

    assert_eq!(bench.ok(&["message", "latest", "prices", "b"]), "{\"of\":\"b\",\"n\":3}\n");
    let latest = bench.json(&["message", "latest", "prices", "b"]);
    assert_eq!((&latest["id"], &latest["payload"]["n"]), (&json!(3), &json!(3)));
    let current = bench.json(&["message", "current", "prices"]);
    assert_eq!((&current[0]["key"], &current[1]["key"]), (&json!("a"), &json!("b")));
    let page = bench.json(&["message", "current", "prices", "--after", "a", "--limit", "1"]);
    assert_eq!(page.as_array().unwrap().len(), 1);
    assert!(bench.ok(&["message", "current", "prices"]).contains("KEY"));

    assert_eq!(bench.json(&["message", "remove", "prices", "b"]), json!({"ids": [4]}));
    let none = bench.run(&["message", "latest", "prices", "b"]);
    none.assert_error(3, &["\"b\"", "no value", "message current"]);
    let args = ["consume", "prices", "--group", "g", "--until-caught-up", "--json"];
    let printed = bench.ok(&args);
    let last = printed.lines().find(|line| line.contains("\"id\":4")).unwrap();
    assert!(last.contains("\"tombstone\":true") && last.contains("\"payload\":null"), "{last}");

    let compact = ["stream", "compact", "prices"];
    assert_eq!(bench.json(&compact)["removed"], 0, "too young");
    let now = [&compact[..], &["--min-age", "0s"]].concat();
    let done = json!({"looked_at": 4, "removed": 2, "floor": 4, "busy": false, "reclaimed": []});
    assert_eq!(bench.json(&now), done);
    assert!(bench.ok(&compact).contains("removed 0 of 2 messages up to id 4"));

    bench.ok(&["group", "create", "prices", "labels", "--newest-only"]);
    let shown = || bench.json(&["group", "show", "prices", "labels"])["newest_only"].clone();
    assert_eq!(shown(), true);
    assert!(bench.ok(&["group", "show", "prices", "labels"]).contains("newest message only"));
    bench.ok(&["group", "alter", "prices", "labels", "--newest-only=false"]);
    assert_eq!(shown(), false);

    bench.ok(&["stream", "create", "orders"]);
    let args = ["group", "create", "orders", "labels", "--newest-only"];
    bench.run(&args).assert_error(2, &["not compacted"]);
    bench.run(&["message", "latest", "orders", "b"]).assert_error(2, &["not compacted"]);
    bench.run(&["message", "remove", "orders", "b"]).assert_error(1, &["no tombstones"]);
}

#[test]
fn a_key_that_cannot_be_is_told_as_a_key() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "prices", "--compacted"]);
    let long = "k".repeat(1_025);
    for keys in [&[&*long][..], &["a", &long]] {
        let ran = bench.run(&[&["message", "remove", "prices"], keys].concat());
        let words = ["cannot remove \"kkk", "the key has 1025 bytes", "Nothing was removed"];
        let ran = ran.assert_error(1, &words);
        assert!(!ran.stderr.contains("message") && !ran.stderr.contains("batch"), "{}", ran.stderr);
    }
    let line = format!("{{\"k\": \"{long}\"}}");
    bench.ok(&["stream", "create", "orders"]);
    bench
        .run_with(&["produce", "orders", "--idempotency-key-field", "k"], line.as_bytes())
        .assert_error(1, &["line 1: the idempotency key has 1025 bytes"]);
}
