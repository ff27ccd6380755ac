//! Names are any text.

use crate::support::Bench;

const ODD: [&str; 6] = [
    "two words",
    "it's \"quoted\"",
    "🦀 Ünïcode",
    "'; DROP SCHEMA sqlstreams CASCADE; --",
    "--help",
    "tab\tand\nline",
];

#[test]
fn streams_and_groups_of_odd_names_work() {
    let bench = Bench::new();
    for name in ODD {
        bench.ok(&["stream", "create", "--", name]);
        bench.run_with(&["produce", "--", name], b"1\n2\n").assert_ok();
        let group = format!("--group={name}");
        // One at a time, or the order is not promised.
        let args = ["consume", &group, "--until-caught-up", "--concurrency", "1", "--", name];
        let consumed = bench.ok(&args);
        assert_eq!(consumed, "1\n2\n");
        let shown = bench.ok(&["group", "show", "--json", "--", name, name]);
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!((&shown["stream"], &shown["group"]), (&name.into(), &name.into()));
        bench.ok(&["group", "drop", "--yes", "--", name, name]);
    }
    let listed = bench.json(&["stream", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), ODD.len());
    // In a table, a name stays on its line.
    assert_eq!(bench.ok(&["stream", "list"]).lines().count(), ODD.len() + 1);
    for name in ODD {
        bench.ok(&["stream", "drop", "--yes", "--", name]);
    }
}

#[test]
fn empty_and_long_names_are_refused() {
    let bench = Bench::new();
    bench.run(&["stream", "create", ""]).assert_error(2, &["empty", "200 bytes"]);
    bench.run(&["stream", "create", &"é".repeat(101)]).assert_error(2, &["202 bytes"]);
    bench.ok(&["stream", "create", &"é".repeat(100)]);
    bench.ok(&["stream", "create", "s"]);
    bench.run(&["consume", "s", "--group", ""]).assert_error(2, &["group name", "empty"]);
}
