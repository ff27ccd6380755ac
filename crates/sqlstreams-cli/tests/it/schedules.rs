//! Schedules on the command line.

use serde_json::json;

use crate::support::{Bench, program, run};

const CREATE: [&str; 6] = ["schedule", "create", "nightly", "orders", "--cron", "30 2 * * *"];

#[test]
fn a_schedule_from_its_creation_to_its_end() {
    let bench = Bench::with_orders("");
    let args =
        [&CREATE[..], &["--zone", "Europe/Berlin", "--payload", r#"{"n": 1}"#, "--key", "k"]]
            .concat();
    let created = bench.json(&args);
    assert_eq!((&created["state"], &created["zone"]), (&json!("active"), &json!("Europe/Berlin")));
    assert_eq!((&created["missed"], &created["grace_seconds"]), (&json!("once"), &json!(60.0)));
    bench.run(&args).assert_error(1, &["exists already"]);
    let again = bench.json(&[&args[..], &["--replace"]].concat());
    assert_eq!(again["next_fire"], created["next_fire"]);
    let next = bench.json(&["schedule", "next", "nightly", "--count", "3"]);
    assert_eq!(next[0]["time"], created["next_fire"]);
    assert!(next[2]["local"].as_str().unwrap().contains("02:30:00 CE"), "{next}");

    assert!(bench.ok(&["schedule", "run", "nightly"]).contains("produced message 1"));
    let lines = bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up", "--json"]);
    assert!(lines.contains(r#""schedule":"nightly""#) && lines.contains("fire_time"), "{lines}");
    let history = bench.json(&["schedule", "history", "nightly"]);
    assert_eq!((&history[0]["kind"], &history[0]["message"]), (&json!("manual"), &json!(1)));
    assert!(bench.ok(&["schedule", "history", "nightly"]).contains("manual"));
    assert_eq!(
        bench.ok(&["schedule", "history", "nightly", "--before", "1"]),
        "no more is known\n"
    );

    assert!(bench.ok(&["schedule", "pause", "nightly"]).contains("paused"));
    assert!(bench.ok(&["schedule", "list"]).contains("paused"));
    assert_eq!(bench.json(&["schedule", "resume", "nightly"])["state"], "active");
    let altered =
        bench.json(&["schedule", "alter", "nightly", "--cron", "@every 90s", "--missed", "all"]);
    assert_eq!((&altered["cron"], &altered["missed"]), (&json!("@every 90s"), &json!("all")));
    assert_eq!(altered["key"], "k");
    let altered = bench.json(&["schedule", "alter", "nightly", "--payload", "2"]);
    assert_eq!((&altered["key"], &altered["payload"]), (&json!(null), &json!("2")));
    let shown = bench.ok(&["schedule", "show", "nightly"]);
    for said in [
        "schedule \"nightly\" of stream \"orders\": active",
        "@every 90s",
        "message 1",
        "all, 100 at most",
    ] {
        assert!(shown.contains(said), "{said}: {shown}");
    }
    let once = bench.json(&[
        "schedule",
        "create",
        "once",
        "orders",
        "--at",
        "2100-01-01",
        "--payload",
        "1",
    ]);
    assert_eq!(once["next_fire"], "2100-01-01T00:00:00.000000Z");
    let page = bench.run(&["schedule", "list", "--limit", "1"]).assert_ok();
    assert!(page.stderr.contains("--after nightly"), "{}", page.stderr);
    assert_eq!(bench.json(&["schedule", "list", "--after", "nightly"])[0]["name"], "once");

    bench.run(&["schedule", "drop", "once"]).assert_error(2, &["--yes"]);
    assert_eq!(bench.json(&["schedule", "drop", "once", "--yes"])["dropped"], "once");
    bench
        .run(&["schedule", "show", "once"])
        .assert_error(3, &["no schedule \"once\"", "\"nightly\""]);
    bench.ok(&["stream", "drop", "orders", "--yes"]);
    assert!(bench.ok(&["schedule", "list"]).contains("no schedules yet"));
}

#[test]
fn what_makes_no_sense_is_told() {
    let bench = Bench::with_orders("");
    let payload = ["--payload", "1"];
    for (args, code, said) in [
        (&["orders", "--cron", "61 * * * *"][..], 2, "is no minute"),
        (&["orders", "--cron", "* * *"], 2, "3 fields"),
        (&["orders", "--cron", "0 0 30 2 *"], 2, "ever comes"),
        (&["orders", "--cron", "@daily", "--zone", "Mars/Olympus"], 2, "Europe/Berlin"),
        (&["orders", "--cron", "@daily", "--missed", "never"], 2, "skip, once or all"),
        (&["orders", "--cron", "@daily", "--grace", "2d"], 2, "1 second to 1 day"),
        (&["orders", "--cron", "@daily", "--catch-up", "0"], 2, "not in 1..=1000"),
        (&["orders", "--cron", "@daily", "--at", "2100-01-01"], 2, "cannot be used with"),
        (&["orders", "--at", "2000-01-01"], 2, "has been"),
        (&["orders"], 2, "no times"),
        (&["nowhere", "--cron", "@daily"], 3, "no stream"),
    ] {
        let args = [&["schedule", "create", "s"], args, &payload].concat();
        bench.run(&args).assert_error(code, &[said]);
    }
    let create = ["schedule", "create", "s", "orders", "--cron", "@daily"];
    bench.run(&create).assert_error(2, &["no message"]);
    bench.run(&[&create[..], &["--payload", "no json"]].concat()).assert_error(1, &["json"]);
    bench.run(&["schedule", "alter", "s", "--key", "k"]).assert_error(2, &["as a whole"]);
    bench.run(&["schedule", "alter", "s"]).assert_error(2, &["nothing is to be changed"]);
    bench.run(&["schedule", "alter", "s", "--cron", "@daily"]).assert_error(3, &["no schedule"]);
}

/// Times are previewed without any database.
#[test]
fn tb_128_the_preview_shows_what_becomes_of_the_clocks() {
    let local = |args: &[&str]| {
        let args = [&["schedule", "next", "--count", "3", "--json"], args].concat();
        let times = run(&mut program(&args), b"").assert_ok();
        let times: serde_json::Value = serde_json::from_str(&times.text()).unwrap();
        let times = times.as_array().unwrap().iter();
        times.map(|time| time["local"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let nightly = ["--cron", "30 2 * * *", "--zone", "America/New_York", "--after"];
    assert_eq!(
        local(&[&nightly[..], &["2026-03-07"]].concat()),
        ["2026-03-07 02:30:00 EST", "2026-03-08 03:00:00 EDT", "2026-03-09 02:30:00 EDT"]
    );
    assert_eq!(
        local(&[
            "--cron",
            "30 1 * * *",
            "--zone",
            "America/New_York",
            "--after",
            "2026-10-31T12:00Z"
        ]),
        ["2026-11-01 01:30:00 EDT", "2026-11-02 01:30:00 EST", "2026-11-03 01:30:00 EST"]
    );
    assert_eq!(
        local(&[
            "--cron",
            "*/30 * * * *",
            "--zone",
            "America/New_York",
            "--after",
            "2026-11-01T05:10Z"
        ]),
        ["2026-11-01 01:30:00 EDT", "2026-11-01 01:00:00 EST", "2026-11-01 01:30:00 EST"]
    );
    let args = ["schedule", "next", "--cron", "0 25 * * *"];
    run(&mut program(&args), b"").assert_error(2, &["is no hour"]);
    run(&mut program(&["schedule", "next"]), b"").assert_error(2, &["required"]);
}

#[test]
fn a_question_mark_is_for_days_and_is_said_to_be() {
    let bench = Bench::new();
    let next = |cron| bench.run(&["schedule", "next", "--cron", cron, "--count", "1"]);
    next("0 4 ? * fri").assert_ok();
    next("0 4 13 * ?").assert_ok();
    next("? 4 * * *").assert_error(2, &["\"?\" is no minute", "Write *: ?"]);
}
