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

/// Lines of a contest have rates and costs, and targets say whether they are met.
#[track_caller]
fn assert_contest(facts: &Value, lines: &str, names: &[&str]) {
    let found = facts[lines].as_array().unwrap();
    let found_names: Vec<&str> = found.iter().map(|line| line["name"].as_str().unwrap()).collect();
    assert_eq!(found_names, names, "{facts:#}");
    for line in found {
        let number = |name: &str| line[name].as_f64().unwrap();
        assert!(number("messages") > 0.0 && number("per_second") > 0.0, "{line:#}");
        assert!(number("lowest") <= number("per_second"), "{line:#}");
        assert!(number("per_second") <= number("highest"), "{line:#}");
    }
    let targets = facts["targets"].as_array().unwrap();
    assert!(!targets.is_empty(), "{facts:#}");
    let met = targets.iter().all(|target| target["met"] == true);
    assert_eq!(facts["targets_met"], met, "{facts:#}");
}

#[test]
fn produce_takes_turns_with_plain_loops() {
    let bench = Bench::new();
    let args = "bench produce --quick --rounds 1 --turn 200ms --tasks 4 --batch 20";
    let facts = bench.json(&args.split(' ').collect::<Vec<_>>());
    let names = ["bare unnest", "bare COPY", "batches", "single sends"];
    assert_contest(&facts, "lines", &names);
    for line in &facts["lines"].as_array().unwrap()[..3] {
        let batches = line["messages"].as_u64().unwrap() / 20;
        assert_percentiles(line, "commit_ms", batches);
    }
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn consume_and_pipeline_take_turns_with_plain_loops() {
    let bench = Bench::new();
    let args = "bench consume --rounds 2 --messages 2000 --bytes 10";
    let facts = bench.json(&args.split(' ').collect::<Vec<_>>());
    assert_contest(&facts, "lines", &["bare range read", "group"]);
    assert!(facts["lines"].as_array().unwrap().iter().all(|line| line["messages"] == 4_000));
    let args = "bench pipeline --rounds 1 --turn 500ms --bytes 10";
    let facts = bench.json(&args.split(' ').collect::<Vec<_>>());
    assert_contest(&facts, "lines", &["bare insert and claim", "batches and group"]);
    assert!(facts["dead_rows"].is_array(), "{facts:#}");
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn fanout_counts_what_each_group_reads() {
    let bench = Bench::new();
    let args = "bench fanout --groups 1,3 --messages 500 --rounds 1 --turn 300ms --bytes 10";
    let facts = bench.json(&args.split(' ').collect::<Vec<_>>());
    assert_contest(&facts, "reading", &["bare range read", "1 group", "3 groups"]);
    let messages: Vec<u64> = facts["reading"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line["messages"].as_u64().unwrap())
        .collect();
    assert_eq!(messages, [500, 500, 1_500]);
    assert_contest(&facts, "producing", &["by itself", "beside 3 groups"]);
    assert_eq!(facts["targets"][0]["what"], "3 groups together / one");
    let kept_up = facts["kept_up"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&kept_up), "{facts:#}");
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn failures_are_recorded_redriven_and_done_beside_fresh_messages() {
    let bench = Bench::new();
    let args = "bench failures --messages 1500 --page 400 --fresh 200 --bytes 10";
    let facts = bench.json(&args.split(' ').collect::<Vec<_>>());
    assert_contest(&facts, "lines", &["recorded as dead", "redriven and done"]);
    assert!(facts["lines"].as_array().unwrap().iter().all(|line| line["messages"] == 1_500));
    assert_eq!((&facts["lost"], &facts["fresh_sent"]), (&0.into(), &facts["fresh_handled"]));
    let count = |name: &str| facts[name]["count"].as_u64().unwrap();
    let fresh = count("fresh_beside_failures_ms") + count("fresh_beside_redriven_ms");
    let handled = facts["fresh_handled"].as_u64().unwrap() + facts["repeated"].as_u64().unwrap();
    assert!(fresh <= handled && handled > 0, "{facts:#}");
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn horizon_compares_two_halves() {
    let bench = Bench::new();
    let facts = bench.json(&["bench", "horizon", "--for", "1s", "--bytes", "10"]);
    assert_contest(&facts, "lines", &["without", "held snapshot"]);
    let target = &facts["targets"][0];
    let rate = |line: usize| facts["lines"][line]["messages"].as_f64().unwrap();
    let ratio = rate(1) / rate(0);
    // The halves are of the same length, but for what it takes to end them.
    let measured = target["measured"].as_f64().unwrap();
    assert!((measured / ratio - 1.0).abs() < 0.5, "{facts:#}");
    assert!(facts["dead_rows"].is_array(), "{facts:#}");
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn idle_streams_are_counted_on_their_way() {
    let bench = Bench::new();
    let args = ["bench", "idle", "--streams", "5", "--for", "2s", "--settle", "20s"];
    let facts = bench.json(&args);
    assert_eq!(facts["streams"], 5);
    // Five that are idle do little, but not nothing at all while they settle.
    let statements = facts["statements_per_second"].as_f64().unwrap();
    assert!(statements < 50.0, "{facts:#}");
    // Of a given server nobody knows the processes.
    assert!(facts["server_cpu_percent"].is_null(), "{facts:#}");
    assert_eq!(facts["targets"].as_array().unwrap().len(), 1, "{facts:#}");
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn all_puts_together_what_each_has_found() {
    let bench = Bench::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.html");
    let file = file.to_str().unwrap();
    let args = ["bench", "all", "--quick", "--only", "latency,horizon", "--html", file];
    let ran = bench.run_with(&args, b"");
    let text = ran.text();
    for words in [
        "== sqlstreams bench latency --quick",
        "== sqlstreams bench horizon --quick",
        "== All targets",
        "under a held snapshot / without",
        "ms to the handler, p99",
    ] {
        assert!(text.contains(words), "{words:?} is not in: {text}");
    }
    assert!(!text.contains("bench produce"), "{text}");
    let gross = text.contains("MISSED GROSSLY");
    let ran = ran.assert_code(i32::from(gross));
    assert!(ran.stderr.contains("measuring under a held snapshot"), "{}", ran.stderr);
    let page = fs::read_to_string(file).unwrap();
    assert_eq!(page.matches("<h2>").count(), 2, "{page}");
    assert!(page.ends_with("</html>\n") && page.contains("<svg "), "{page}");
    assert_eq!(bench.sql(LEFT), "0");
}

#[test]
fn all_says_at_once_where_it_cannot_write() {
    let args = ["bench", "all", "--quick", "--html", "/nowhere/at/all.html"];
    run(&mut program(&args), b"").assert_error(1, &["/nowhere/at/all.html"]);
    run(&mut program(&["bench", "all", "--only", "nothing"]), b"").assert_error(2, &["idle"]);
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
    for name in ["latency", "soak", "growth", "chaos", "idle", "all"] {
        let args = ["bench", name];
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
