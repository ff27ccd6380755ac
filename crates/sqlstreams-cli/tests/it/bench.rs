//! The benchmarks: short runs, whose counts have to be right; how fast they were is not for tests.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::{Bench, eventually, program, run, signal};

/// What a benchmark has in the database while it runs: its stream's log and its own tables.
const LEFT: &str = "SELECT count(*) FROM pg_class WHERE relname ~ '^(message_log_|bench_)' AND relkind IN ('r', 'p')";

#[track_caller]
fn assert_percentiles(facts: &Value, name: &str, count: u64) {
    let times = &facts[name];
    assert_eq!(times["count"], count, "{name}: {times}");
    let [p50, p90, p99, p999, max] =
        ["p50", "p90", "p99", "p999", "max"].map(|p| times[p].as_f64().unwrap());
    assert!(p50 <= p90 && p90 <= p99 && p99 <= p999 && p999 <= max, "{name}: {times}");
}

#[test]
fn latency_counts_each_message_after_the_warm_up() {
    let bench = Bench::new();
    let facts = bench.json(&["bench", "latency", "--for", "2s", "--rate", "100"]);
    assert_eq!(facts["postgresql"]["throw_away"], false);
    assert_eq!(facts["postgresql"]["fsync"], "off");
    assert_eq!((&facts["rate"], &facts["listener"]), (&100.into(), &true.into()));
    for name in ["commit_ms", "produce_to_handler_ms", "handler_minus_commit_ms", "sent_late_ms"] {
        assert_percentiles(&facts, name, 200);
    }
    let bare = facts["bare_commit_ms"]["count"].as_u64().unwrap();
    assert!((1..=250).contains(&bare), "{facts:#}");
    let bars = facts["produce_to_handler_histogram"].as_array().unwrap();
    assert_eq!(bars.iter().map(|bar| bar["count"].as_u64().unwrap()).sum::<u64>(), 200);
    let targets = facts["targets"].as_array().unwrap();
    assert_eq!(targets.len(), 2);
    let all_met = targets.iter().all(|target| target["met"] == true);
    assert_eq!(facts["targets_met"], all_met);
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn latency_is_told_in_lines_that_fit() {
    let bench = Bench::new();
    let args = ["bench", "latency", "--for", "1s", "--rate", "50", "--no-listener"];
    let text = bench.ok(&args);
    for words in ["bare insert+commit", "handler − commit", "without listener", "fsync off"] {
        assert!(text.contains(words), "{words:?} is not in: {text}");
    }
    assert!(text.contains("The targets hold.") || text.contains("The targets do not hold."));
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "too long: {line}");
    }
}

#[test]
fn transactional_counts_both_sides() {
    let bench = Bench::new();
    let facts = bench.json(&["bench", "transactional", "--for", "1s", "--at-once", "4"]);
    let rate = |name: &str| facts[name].as_f64().unwrap();
    let (bare, handlers) = (rate("bare_commits_per_second"), rate("handler_commits_per_second"));
    assert!(bare > 0.0 && handlers > 0.0, "{facts:#}");
    assert!((rate("ratio") - handlers / bare).abs() < 1e-9, "{facts:#}");
    assert_eq!(facts["target_met"], rate("ratio") >= rate("target"));
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn routing_counts_both_sides() {
    let bench = Bench::new();
    let args = ["bench", "routing", "--messages", "20000", "--one-in", "3000"];
    let facts = bench.json(&args);
    assert_eq!((&facts["messages"], &facts["matching"]), (&20_000.into(), &8.into()), "{facts:#}");
    let bindings = facts["bindings"].as_array().unwrap();
    assert_eq!(bindings.len(), 3);
    for binding in bindings {
        let rate = |name: &str| binding[name].as_f64().unwrap();
        let (bare, group) = (rate("bare_ids_per_second"), rate("group_ids_per_second"));
        assert!(bare > 0.0 && group > 0.0, "{facts:#}");
        assert!((rate("ratio") - group / bare).abs() < 1e-9, "{facts:#}");
    }
    let met = bindings.iter().all(|binding| binding["ratio"].as_f64() >= facts["target"].as_f64());
    assert_eq!(facts["target_met"], met);
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn fair_counts_both_sides() {
    let bench = Bench::new();
    let args = "bench fair --messages 2000 --keys 500 --backlog 5000";
    let facts = bench.json(&args.split(' ').collect::<Vec<_>>());
    let number = |name: &str| facts[name].as_f64().unwrap();
    let (parallel, fair) = (number("parallel_per_second"), number("fair_per_second"));
    assert!((number("ratio") - fair / parallel).abs() < 1e-9, "{facts:#}");
    assert_eq!(facts["target_met"], number("ratio") >= number("target"));
    assert!(number("parallel_before") > 4_900.0, "{facts:#}");
    assert!(number("fair_before") < 4_900.0, "{facts:#}");
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn keys_say_what_they_cost() {
    let bench = Bench::new();
    let facts = bench.json(&["bench", "keys", "--for", "1s", "--batch", "50"]);
    let rate = |name: &str| facts[name].as_f64().unwrap();
    let (without, with) = (rate("without_keys_per_second"), rate("with_keys_per_second"));
    assert!(without > 0.0 && with > 0.0 && rate("duplicates_per_second") > 0.0, "{facts:#}");
    assert!((rate("ratio") - with / without).abs() < 1e-9, "{facts:#}");
    assert_eq!(facts["target_met"], rate("ratio") >= rate("target"));
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn delay_says_how_late_messages_come() {
    let bench = Bench::new();
    let args = "bench delay --for 1s --messages 2000 --waiting 2000 --bulk 2000";
    let facts = bench.json(&args.split(' ').collect::<Vec<_>>());
    let number = |name: &str| facts[name].as_f64().unwrap();
    assert!(number("moved_per_second") > 0.0 && number("moved_per_second_under_snapshot") > 0.0);
    assert!(number("late_p50_ms") <= number("late_p99_ms"), "{facts:#}");
    assert!(number("late_p99_ms") <= number("late_max_ms"), "{facts:#}");
    let cost = number("consume_ms_beside") / number("consume_ms_without");
    assert!((number("cost") - cost).abs() < 1e-9, "{facts:#}");
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn growth_compares_a_large_log_with_a_small_one() {
    let bench = Bench::new();
    let facts = bench.json(&["bench", "growth", "--messages", "20000", "--small", "4000"]);
    let places = facts["places"].as_array().unwrap();
    let names: Vec<&str> = places.iter().map(|place| place["place"].as_str().unwrap()).collect();
    assert_eq!(names, ["beginning", "middle", "head"]);
    assert_eq!(facts["consumed"], 2_000);
    for place in places {
        let number = |name: &str| place[name].as_f64().unwrap();
        assert!(
            (number("cost") - number("large_ms") / number("small_ms")).abs() < 1e-9,
            "{facts:#}"
        );
    }
    let met = places.iter().all(|place| place["cost"].as_f64() <= facts["target"].as_f64());
    assert_eq!(facts["target_met"], met);
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn soak_counts_what_went_and_loses_nothing() {
    let bench = Bench::new();
    let facts = bench.json(&["bench", "soak", "--for", "10s", "--rate", "1000"]);
    assert!(facts["produced"].as_u64().unwrap() > 1_000, "{facts:#}");
    for group in facts["groups"].as_array().unwrap() {
        assert_eq!(group["lost"], 0, "{facts:#}");
        assert!(group["handled"].as_u64().unwrap() > 100, "{facts:#}");
    }
    assert_eq!(facts["ok"], true, "{facts:#}");
    assert!(facts["partitions_made"].as_i64().unwrap() > 1, "{facts:#}");
    assert!(facts["sizes"].as_array().unwrap().len() >= 2, "{facts:#}");
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn chaos_loses_nothing_and_leaves_nothing() {
    let bench = Bench::new();
    let facts = bench.json(&["bench", "chaos", "--for", "2s", "--rate", "100", "--seed", "7"]);
    let produced = facts["produced"].as_u64().unwrap();
    assert!((100..=250).contains(&produced), "{facts:#}");
    assert_eq!((&facts["seed"], &facts["consumers"]), (&7.into(), &3.into()));
    assert_eq!(facts["ordered"]["out_of_order"], 0);
    for group in ["plain", "ordered"] {
        let count = &facts[group];
        assert_eq!(count["group"], group);
        assert_eq!((&count["lost"], &count["altered"]), (&0.into(), &0.into()), "{facts:#}");
        let number = |name: &str| count[name].as_u64().unwrap();
        assert_eq!(number("handled") + number("dead"), produced, "{facts:#}");
        let rows = number("handled") + number("repeated") + number("failed");
        assert_eq!(number("rows"), rows, "{facts:#}");
    }
    let workers = &facts["workers"];
    let done = ["killed", "frozen", "restarted"].map(|name| workers[name].as_u64().unwrap());
    assert!(done.iter().sum::<u64>() > 0, "{facts:#}");
    assert_eq!(workers["failed"], 0);
    assert!(facts["drained_in_seconds"].is_number());
    assert_eq!(facts["ok"], true);
    assert_eq!(bench.sql(LEFT), "0");
}

/// The same keys in a parallel group: what an ordered one keeps in order is not in order by itself.
#[test]
fn chaos_tells_order_from_disorder() {
    let bench = Bench::new();
    let args = ["bench", "chaos", "--messages", "1000", "--keys", "10", "--failures", "20"];
    let facts = bench.json(&args);
    assert_eq!((&facts["produced"], &facts["rate"]), (&1000.into(), &serde_json::Value::Null));
    let ordered = &facts["ordered"];
    assert_eq!((&ordered["out_of_order"], &ordered["lost"]), (&0.into(), &0.into()), "{facts:#}");
    assert!(ordered["failed"].as_u64().unwrap() > 100, "{facts:#}");
    assert!(facts["plain"]["out_of_order"].as_u64().unwrap() > 0, "{facts:#}");
}

#[test]
fn interrupted_they_leave_nothing() {
    for args in [["bench", "latency"], ["bench", "soak"], ["bench", "growth"], ["bench", "chaos"]] {
        let bench = Bench::new();
        let mut child = bench.start(&args);
        eventually("it has begun", || bench.sql(LEFT) != "0");
        signal(&child, Signal::INT);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{args:?}");
        assert_eq!(bench.sql(LEFT), "0", "{args:?}");
    }
}

#[test]
fn workers_end_with_what_started_them() {
    let bench = Bench::new();
    let mut child = bench.start(&["bench", "chaos", "--rate", "10"]);
    let connections = || {
        let sql = "SELECT count(*) FROM pg_stat_activity
                   WHERE datname = current_database() AND pid <> pg_backend_pid()";
        bench.sql(sql).parse::<u32>().unwrap()
    };
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let workers = || fs::read_to_string(&children).unwrap_or_default();
    eventually("workers consume", || connections() >= 8 && !workers().is_empty());
    let workers: Vec<String> = workers().split_whitespace().map(str::to_owned).collect();
    // No chance to clean up.
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("they are gone", || {
        connections() == 0
            && workers.iter().all(|pid| {
                // A process that nobody has waited for is gone all the same.
                let status = fs::read_to_string(Path::new("/proc").join(pid).join("status"));
                status.is_ok_and(|status| status.contains("State:\tZ")) || !exists(pid)
            })
    });
}

fn exists(pid: &str) -> bool {
    Path::new("/proc").join(pid).exists()
}

#[test]
fn a_worker_is_not_for_people() {
    let help = run(&mut program(&["bench", "--help"]), b"").assert_ok().text();
    assert!(!help.contains("chaos-worker"), "{help}");
    let args = ["bench", "chaos-worker", "--stream", "s", "--name", "0.0"];
    run(&mut program(&args), b"").assert_error(2, &["`bench chaos` starts this"]);
}
