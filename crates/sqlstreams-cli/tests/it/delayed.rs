//! Messages that are not due yet.

use serde_json::json;

use crate::support::Bench;

#[test]
fn they_are_listed_page_by_page_however_late_they_are_due() {
    let bench = Bench::with_orders("");
    for delay in ["1h", "3000000d", "3000001d", "3649000d"] {
        bench.run_with(&["produce", "orders", "--delay", delay], b"1\n").assert_ok();
    }
    bench.sql("UPDATE sqlstreams.message_delayed_1 SET deliver_at = '294276-12-31T23:59:59.999999Z' WHERE id = 4");
    let all = bench.json(&["delayed", "list", "orders"]);
    let due: Vec<&str> =
        all.as_array().unwrap().iter().map(|row| row["deliver_at"].as_str().unwrap()).collect();
    for (id, at) in (1..).zip(&due) {
        // Both are the same to PostgreSQL.
        let same =
            format!("SELECT deliver_at = '{at}' FROM sqlstreams.message_delayed_1 WHERE id = {id}");
        assert_eq!(bench.sql(&same), "t", "{at}");
    }
    assert!(due[1] > "10200" && due[1] < "10300" && due[3].starts_with("294276-12-31T"), "{due:?}");

    // Each page says where the next begins; the hint is pasted into a shell.
    let (mut after, mut seen) = (String::new(), Vec::new());
    for _ in 0..due.len() {
        let line = format!("exec \"$0\" delayed list orders --limit 1 {after}");
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &line, env!("CARGO_BIN_EXE_sqlstreams")]);
        let ran = crate::support::run(shell.env("DATABASE_URL", &bench.url), b"").assert_ok();
        seen.push(ran.text().lines().nth(1).unwrap().trim_start()[..1].to_owned());
        let hint = ran.stderr.split_once("for more: ").unwrap().1;
        after = hint.split_once(" or ").unwrap().0.to_owned();
        assert!(after.starts_with("--after '"), "{after}");
    }
    assert_eq!(seen, ["1", "2", "3", "4"]);
    let last = format!("{}/4", due[3]);
    let rest = ["delayed", "list", "orders", "--after", &last];
    assert_eq!(bench.json(&rest), json!([]));
    for wrong in ["beyond the calendar/4", "12026-02-30/4", "infinity/4"] {
        bench
            .run(&["delayed", "list", "orders", "--after", wrong])
            .assert_error(2, &["write a time and an id"]);
    }
    bench
        .run(&["produce", "orders", "--deliver-at", "20000-01-01"])
        .assert_error(2, &["more than 10,000 years ahead"]);
}

#[test]
fn a_message_may_have_been_produced_in_any_year() {
    let bench = Bench::with_orders("");
    bench.sql("INSERT INTO sqlstreams.message_log_1 (payload, produced_at) VALUES ('1', '20260-03-01T12:00:00Z'), ('2', 'infinity')");
    let lines = bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up", "--json"]);
    for at in ["20260-03-01T12:00:00.000000Z", "infinity"] {
        assert!(lines.contains(&format!("\"produced_at\":\"{at}\"")), "{lines}");
    }
}
