//! Settings of streams and groups: creating with them, changing them, pausing.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::time::Duration;

use rustix::process::Signal;

use crate::support::{Bench, eventually, signal};

#[test]
fn a_stream_notifies_or_does_not() {
    let bench = Bench::new();
    assert_eq!(bench.json(&["stream", "create", "quiet"])["notify"], false);
    assert_eq!(bench.json(&["stream", "create", "loud", "--notify"])["notify"], true);
    let triggers = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE '%ring%' OR tgfoid = 'sqlstreams.ring_on_insert'::regproc";
    assert_eq!(bench.sql(triggers), "1");
    assert_eq!(bench.json(&["stream", "alter", "quiet", "--notify", "on"])["notify"], true);
    assert!(bench.ok(&["stream", "alter", "loud", "--notify", "off"]).contains("do not wake"));
    assert_eq!(bench.json(&["stream", "show", "loud"])["notify"], false);
    assert!(bench.ok(&["stream", "show", "quiet"]).contains("notify     on"));
    let listed = bench.ok(&["stream", "list"]);
    assert!(listed.contains("NOTIFY") && listed.contains(" on ") && listed.contains(" off "));
    bench.run(&["stream", "alter", "quiet"]).assert_error(2, &["--notify"]);
    bench
        .run(&["stream", "alter", "quiet", "--notify", "maybe"])
        .assert_error(2, &["write on or off"]);
    bench
        .run(&["stream", "alter", "none", "--notify", "on"])
        .assert_error(3, &["no stream \"none\"", "\"quiet\""]);
}

#[test]
fn durations_may_be_days() {
    let bench = Bench::with_orders("");
    let alter = ["stream", "alter", "orders", "--idempotency-window"];
    for (window, seconds) in [("7d", 604_800.0), ("1w", 604_800.0), ("365 days", 31_536_000.0)] {
        let altered = bench.json(&[&alter[..], &[window]].concat());
        assert_eq!(altered["idempotency_window_seconds"], seconds, "{window}");
    }
    bench.run(&[&alter[..], &["366d"]].concat()).assert_error(2, &["365"]);
    bench.run(&[&alter[..], &["soon"]].concat()).assert_error(2, &["1h 30m, 7d or 2w"]);

    let delayed = bench.run_with(&["produce", "orders", "--delay", "10d"], b"1\n").assert_ok();
    assert!(delayed.stderr.contains("1 line delayed"), "{}", delayed.stderr);
    for (delay, said) in [("inf", "write it as"), ("99999999999d", "too long"), ("15", "15s")] {
        bench.run(&["produce", "orders", "--delay", delay]).assert_error(2, &["--delay", said]);
    }
    let created = bench.json(&["group", "create", "orders", "g", "--lease", "1d"]);
    assert_eq!(created["lease_seconds"], 86_400.0);
    bench.ok(&["consume", "orders", "-g", "h", "--from", "1d ago", "--until-caught-up"]);

    bench.ok(&["stream", "create", "prices", "--compacted"]);
    bench.ok(&["stream", "compact", "prices", "--tombstone-age", "7d"]);
    let ages = [
        ("--min-age", "99999999h"),
        ("--min-age", "1001w 400000d"),
        ("--tombstone-age", "400000d"),
    ];
    for (age, long) in ages {
        bench.run(&["stream", "compact", "prices", age, long]).assert_code(2);
    }
    bench
        .run(&["stream", "compact", "prices", "--min-age", "400000d"])
        .assert_error(2, &["min_age is above 1,000 years"]);
}

#[test]
fn a_group_is_created_and_altered() {
    let bench = Bench::with_orders("1\n2\n3\n");
    let plain = bench.json(&["group", "create", "orders", "plain"]);
    let null = serde_json::Value::Null;
    assert_eq!((&plain["max_in_flight"], &plain["rate_limit"]), (&null, &null));
    assert_eq!((&plain["paused"], &plain["lag"]), (&false.into(), &3.into()));
    assert_eq!((&plain["lease_seconds"], &plain["max_attempts"]), (&15.0.into(), &5.into()));

    let args = ["group", "create", "orders", "g", "--from", "latest", "--max-in-flight", "8"];
    let created = bench.json(&[&args[..], &["--rate-limit", "2.5", "--lease", "2s"]].concat());
    assert_eq!((&created["max_in_flight"], &created["rate_limit"]), (&8.into(), &2.5.into()));
    assert_eq!((&created["lease_seconds"], &created["lag"]), (&2.0.into(), &0.into()));
    bench.run(&args).assert_error(1, &["has a group g already"]);

    let args = ["group", "alter", "orders", "g", "--max-attempts", "9", "--backoff-cap", "1h"];
    let altered = bench.json(&[&args[..], &["--backoff-base", "0s"]].concat());
    assert_eq!((&altered["max_attempts"], &altered["backoff_factor"]), (&9.into(), &2.0.into()));
    assert_eq!(altered["backoff_cap_seconds"], 3600.0);
    assert_eq!(altered["backoff_base_seconds"], 0.0);
    // What is not named stays.
    assert_eq!((&altered["max_in_flight"], &altered["lease_seconds"]), (&8.into(), &2.0.into()));
    assert_eq!(bench.json(&["group", "show", "orders", "g"]), altered);
    let shown = bench.ok(&["group", "show", "orders", "g"]);
    for words in ["LIMITS", "8 in flight, 2.5/s", "lease    2s", "9 attempts"] {
        assert!(shown.contains(words), "{words:?} is not in: {shown}");
    }
    let args = ["group", "alter", "orders", "g", "--max-in-flight", "0", "--rate-limit", "0"];
    assert!(bench.ok(&args).contains("changed group \"g\""));
    let lifted = bench.json(&["group", "show", "orders", "g"]);
    assert_eq!((&lifted["max_in_flight"], &lifted["rate_limit"]), (&null, &null));

    bench.run(&["group", "alter", "orders", "g"]).assert_error(2, &["no setting is named"]);
    bench
        .run(&["group", "alter", "orders", "g", "--rate-limit=-1"])
        .assert_error(2, &["rate_limit is"]);
    bench
        .run(&["group", "alter", "orders", "g", "--backoff-factor", "0.5"])
        .assert_error(2, &["backoff_factor is 1 to 1000"]);
    bench
        .run(&["group", "alter", "orders", "none", "--max-in-flight", "1"])
        .assert_error(3, &["no group \"none\"", "\"g\""]);
}

#[test]
fn a_group_is_paused_and_resumed_while_it_is_consumed() {
    let bench = Bench::with_orders("1\n");
    bench.ok(&["group", "create", "orders", "g"]);
    let consumer: Child = bench.start(&["consume", "orders", "-g", "g"]);
    let resolved = || bench.json(&["group", "show", "orders", "g"])["resolved"].clone();
    eventually("the first is handled", || resolved() == 1);

    assert!(bench.ok(&["group", "pause", "orders", "g"]).contains("paused group \"g\""));
    assert_eq!(bench.json(&["group", "pause", "orders", "g"])["paused"], true);
    assert!(bench.ok(&["group", "list", "orders"]).contains("paused"));
    // It takes effect within a second.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    bench.run_with(&["produce", "orders"], b"2\n").assert_ok();
    std::thread::sleep(std::time::Duration::from_millis(700));
    assert_eq!(resolved(), 1);

    assert!(bench.ok(&["group", "resume", "orders", "g"]).contains("resumed group \"g\""));
    assert_eq!(bench.json(&["group", "resume", "orders", "g"])["paused"], false);
    eventually("the second is handled", || resolved() == 2);
    signal(&consumer, Signal::TERM);
    let ended = consumer.wait_with_output().unwrap();
    assert!(ended.status.code().is_some());
    bench.run(&["group", "pause", "orders", "none"]).assert_error(3, &["no group \"none\""]);
}

#[test]
fn a_consumer_of_a_paused_group_says_so() {
    for mode in ["parallel", "ordered", "fair"] {
        let bench = Bench::with_orders("1\n");
        bench.ok(&["group", "create", "orders", "the group", "--mode", mode]);
        bench.ok(&["group", "pause", "orders", "the group"]);
        let mut consumer: Child =
            bench.start(&["consume", "orders", "-g", "the group", "--until-caught-up"]);
        let mut stderr = BufReader::new(consumer.stderr.take().unwrap()).lines();
        let said = stderr.next().unwrap().unwrap();
        assert_eq!(
            said,
            "group \"the group\" is paused; `sqlstreams group resume orders 'the group'` goes on"
        );
        std::thread::sleep(Duration::from_secs(1));
        assert!(consumer.try_wait().unwrap().is_none(), "it did not wait");
        bench.ok(&["group", "resume", "orders", "the group"]);
        // That it goes on is told before, where it has more to do.
        let last = stderr.map(Result::unwrap).last().unwrap();
        assert!(last.contains("1 handled"), "{last}");
        assert!(consumer.wait().unwrap().success());
    }
}

#[test]
fn a_consumer_says_when_its_group_is_paused_meanwhile() {
    let bench = Bench::with_orders("1\n");
    let mut consumer: Child = bench.start(&["consume", "orders", "-g", "g", "--json"]);
    let mut stderr = BufReader::new(consumer.stderr.take().unwrap()).lines();
    eventually("the first is handled", || {
        bench.json(&["group", "list", "orders"])[0]["resolved"] == 1
    });
    for (command, said) in [("pause", "paused"), ("resume", "resumed"), ("pause", "paused")] {
        bench.ok(&["group", command, "orders", "g"]);
        let line: serde_json::Value =
            serde_json::from_str(&stderr.next().unwrap().unwrap()).unwrap();
        assert_eq!(line[said]["group"], "g", "{line}");
    }
    signal(&consumer, Signal::TERM);
    let rest: Vec<String> = stderr.map(Result::unwrap).collect();
    assert!(rest.len() == 1 && rest[0].contains("summary"), "{rest:?}");
    assert!(consumer.wait().unwrap().success());
}

/// Hints are for whoever reads them here: no arguments of SQL functions.
#[test]
fn what_is_out_of_range_is_told_in_words_that_are_no_sql() {
    let bench = Bench::with_orders("");
    for (option, value, words) in [
        ("--retain-for", "1ms", "Without this limit they are kept for ever"),
        ("--retain-dead-for", "1ms", "Without this limit they are kept for ever"),
        ("--expire-groups-after", "59m", "let them never expire"),
        ("--idempotency-window", "1s", "The default, 24 hours"),
    ] {
        let ran = bench.run(&["stream", "alter", "orders", option, value]);
        let ran = ran.assert_error(2, &[words]);
        for sql in ["NULL", "p_", "Say 0", "=>"] {
            assert!(!ran.stderr.contains(sql), "{option}: {}", ran.stderr);
        }
    }
}
