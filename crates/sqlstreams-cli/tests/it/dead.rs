//! Dead letters.

use serde_json::json;

use crate::support::Bench;

/// A stream of five messages, all dead for group `g`.
fn all_dead() -> Bench {
    let bench = Bench::with_orders("");
    let lines = b"{\"k\":1}\n{\"k\":2}\n{\"k\":3}\n{\"k\":4}\n{\"k\":5}\n";
    bench.run_with(&["produce", "orders", "--key-field", "k"], lines).assert_ok();
    let script = "echo \"no good: $(cat)\" >&2; printf '\\033[31mred\\n' >&2; exit 65";
    let args = ["consume", "orders", "-g", "g", "--until-caught-up", "--exec", "sh", "-c", script];
    bench.run(&args).assert_ok();
    bench
}

fn ids(bench: &Bench, more: &[&str]) -> Vec<i64> {
    let args: Vec<&str> =
        ["dead", "list", "orders", "-g", "g"].into_iter().chain(more.iter().copied()).collect();
    let letters = bench.json(&args);
    letters.as_array().unwrap().iter().map(|l| l["id"].as_i64().unwrap()).collect()
}

#[test]
fn they_are_listed_by_page() {
    let bench = all_dead();
    assert_eq!(ids(&bench, &[]), [1, 2, 3, 4, 5]);
    assert_eq!(ids(&bench, &["--limit", "2"]), [1, 2]);
    assert_eq!(ids(&bench, &["--limit", "2", "--after", "2"]), [3, 4]);
    let ran = bench.run(&["dead", "list", "orders", "-g", "g", "--limit", "2"]).assert_ok();
    assert_eq!(ran.text().lines().count(), 3);
    assert!(!ran.text().contains('\u{1b}'), "control characters reach the terminal");
    assert!(ran.stderr.contains("2 shown of 5") && ran.stderr.contains("--after 2"));
    bench.run(&["dead", "list", "orders", "-g", "x"]).assert_error(3, &["no group \"x\"", "\"g\""]);
}

#[test]
fn one_is_shown_with_everything() {
    let bench = all_dead();
    let shown = bench.json(&["dead", "show", "orders", "2", "-g", "g"]);
    assert_eq!(
        (&shown["id"], &shown["key"], &shown["attempts"]),
        (&json!(2), &json!("2"), &json!(1))
    );
    assert_eq!(shown["payload"], json!({"k": 2}));
    assert!(shown["error"].as_str().unwrap().starts_with("no good: {\"k\":2}"));
    assert_eq!(shown["history"].as_array().unwrap().len(), 1);
    let spelled = |at: &serde_json::Value| at.as_str().unwrap().ends_with('Z');
    assert!(spelled(&shown["history"][0]["at"]) && spelled(&shown["dead_at"]), "{shown}");
    let text = bench.ok(&["dead", "show", "orders", "2", "-g", "g"]);
    for part in ["dead letter of group g", "no good", "history", "payload", "{\"k\":2}"] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    assert!(!text.contains("+00:00"), "{text}");
    assert!(!text.contains('\u{1b}'), "control characters reach the terminal");
    bench
        .run(&["dead", "show", "orders", "77", "-g", "g"])
        .assert_error(3, &["message 77 is no dead letter", "1, 2, 3, 4, 5"]);
}

#[test]
fn they_are_redriven_by_id_and_all_at_once() {
    let bench = all_dead();
    bench.run(&["dead", "redrive", "orders", "-g", "g"]).assert_error(2, &["--all"]);
    bench.run(&["dead", "redrive", "orders", "-g", "g", "1", "--all"]).assert_error(2, &["--all"]);
    let ran = bench.run(&["dead", "redrive", "orders", "-g", "g", "2", "77"]).assert_ok();
    assert!(ran.text().contains("1 dead letter redriven"), "{}", ran.text());
    assert!(ran.stderr.contains("not dead letters of group \"g\": 77"), "{}", ran.stderr);
    bench.run(&["dead", "redrive", "orders", "-g", "g", "2"]).assert_error(3, &["2"]);
    assert_eq!(ids(&bench, &[]), [1, 3, 4, 5]);
    let told = bench.json(&["dead", "redrive", "orders", "-g", "g", "--all"]);
    assert_eq!(told, json!({"redriven": 4, "not_dead": []}));
    let told = bench.json(&["dead", "redrive", "orders", "-g", "g", "--all"]);
    assert_eq!(told["redriven"], 0);
    let again = bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up"]);
    assert_eq!(again.lines().count(), 5);
    assert_eq!(bench.ok(&["dead", "list", "orders", "-g", "g"]).trim(), "no dead letters");
}

#[test]
fn they_are_discarded_when_confirmed() {
    let bench = all_dead();
    bench
        .run(&["dead", "discard", "orders", "-g", "g", "--all"])
        .assert_error(2, &["5 dead letters", "--yes"]);
    assert_eq!(ids(&bench, &[]).len(), 5);
    bench.ok(&["dead", "discard", "orders", "-g", "g", "1", "3", "--yes"]);
    assert_eq!(ids(&bench, &[]), [2, 4, 5]);
    let told = bench.json(&["dead", "discard", "orders", "-g", "g", "--all", "--yes"]);
    assert_eq!(told["discarded"], 3);
    assert_eq!(ids(&bench, &[]), [] as [i64; 0]);
    assert_eq!(bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up"]), "");
}

#[test]
fn thousands_are_redriven_in_batches() {
    let lines: String = (0..2_500).map(|n| format!("{n}\n")).collect();
    let bench = Bench::with_orders(&lines);
    // A group whose every message is dead, by the protocol itself: a command for each would take long.
    bench.ok(&["consume", "orders", "-g", "g", "--from", "latest", "--until-caught-up"]);
    let id = bench.json(&["stream", "show", "orders"])["id"].clone();
    bench.sql(&format!(
        "INSERT INTO sqlstreams.exception_queue_{id} (group_id, message_id, state, attempts, due_at, first_failed_at, dead_at, last_error)
         SELECT g.id, m.id, 'dead', 5, now(), now(), now(), 'x' FROM sqlstreams.message_log_{id} m, sqlstreams.consumer_group g"
    ));
    assert_eq!(bench.json(&["dead", "redrive", "orders", "-g", "g", "--all"])["redriven"], 2_500);
    let again = bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up"]);
    assert_eq!(again.lines().count(), 2_500);
}
