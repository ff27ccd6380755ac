//! Producing.

use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::support::{Bench, eventually, run, sorted};

/// Every payload that a stream of bytes can hold but a line cannot: line feeds.
fn odd_payloads() -> Vec<u8> {
    let mut lines = Vec::new();
    for byte in 0..=255_u8 {
        if byte != b'\n' {
            lines.extend([b'x', byte, b'\n']);
        }
    }
    lines
        .extend_from_slice(b"ends in a carriage return\r\n\xff\xfe not UTF-8\n  blanks around  \n");
    lines.extend(std::iter::repeat_n(b'y', 300_000));
    lines.extend_from_slice(b"\nwithout a line feed");
    lines
}

#[test]
fn bytes_come_out_as_they_went_in() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "raw", "--payload-type", "bytea"]);
    let input = odd_payloads();
    bench.run_with(&["produce", "raw"], &input).assert_ok();
    let args = ["consume", "raw", "-g", "g", "--until-caught-up", "--concurrency", "1"];
    let output = bench.run(&args).assert_ok().stdout;
    let expected: Vec<u8> = input.iter().copied().chain([b'\n']).collect();
    assert!(output == expected, "{} bytes in, {} out", expected.len(), output.len());
}

#[test]
fn json_keeps_its_spelling() {
    let lines = concat!(
        "{\"b\": 1,   \"a\": 2, \"a\": 3}\n",
        "  [1e400, 0.10, 123456789012345678901234567890]  \n",
        "\"\\u0000 caf\\u00e9 café 🦀\"\n",
        "null\r\n",
    );
    let bench = Bench::with_orders(lines);
    let args = ["consume", "orders", "-g", "g", "--until-caught-up", "-c", "1"];
    assert_eq!(bench.ok(&args), lines);
}

#[test]
fn lines_with_a_known_idempotency_key_are_not_stored_again() {
    let bench = Bench::with_orders("");
    let args = ["produce", "orders", "--idempotency-key-field", "id", "--json"];
    let send = |lines: &str| {
        let ran = bench.run_with(&args, lines.as_bytes()).assert_ok();
        (serde_json::from_slice::<Value>(&ran.stdout).unwrap(), ran.stderr)
    };
    let (sent, _) = send("{\"id\": 1}\n{\"id\": 2}\n{\"id\": 1}\n");
    assert_eq!((&sent["stored"], &sent["duplicates"]), (&json!(2), &json!(1)), "{sent}");
    let (sent, errors) = send("{\"id\": 1}\n{\"id\": 2, \"x\": 0}\n{\"id\": 3}\n");
    assert_eq!(
        (&sent["stored"], &sent["duplicates"], &sent["conflicts"]),
        (&json!(1), &json!(2), &json!(1))
    );
    assert_eq!(errors.trim(), "{\"conflict\":{\"id\":2,\"line\":2}}");
    assert_eq!(
        (&sent["first_id"], &sent["last_id"], &sent["next_line"]),
        (&json!(3), &json!(3), &json!(4))
    );
    let ran = bench.run_with(&args[..4], b"{\"id\": 1}\n{\"id\": 2, \"x\": 0}\n").assert_ok();
    assert!(
        ran.stderr.contains("line 2 is not stored: message 2 has its idempotency key"),
        "{}",
        ran.stderr
    );
    assert!(
        ran.stderr.contains("0 lines stored in stream \"orders\"; 2 duplicates, 1 of them"),
        "{}",
        ran.stderr
    );
    bench.run_with(&args, b"{\"no\": 1}\n").assert_code(1);
}

#[test]
fn delayed_lines_wait_and_can_be_taken_back() {
    let bench = Bench::with_orders("");
    let args = ["produce", "orders", "--delay", "1h", "--json"];
    let sent = bench.run_with(&args, b"1\n2\n3\n").assert_ok();
    let sent: Value = serde_json::from_slice(&sent.stdout).unwrap();
    assert_eq!(
        (&sent["stored"], &sent["delayed"], &sent["first_id"]),
        (&json!(0), &json!(3), &Value::Null)
    );
    let ran =
        bench.run_with(&["produce", "orders", "--deliver-at", "2999-01-01T00:00:00Z"], b"4\n");
    assert!(ran.stderr.contains("; 1 line delayed"), "{}", ran.stderr);
    assert_eq!(bench.json(&["stream", "show", "orders"])["delayed"], 4);
    let list = bench.json(&["delayed", "list", "orders"]);
    let payloads: Vec<&Value> = list.as_array().unwrap().iter().map(|d| &d["payload"]).collect();
    assert_eq!(payloads, [&json!(1), &json!(2), &json!(3), &json!(4)]);
    assert_eq!(list[3]["deliver_at"], "2999-01-01T00:00:00.000000Z");
    // In pages.
    let after = format!("{}/{}", list[1]["deliver_at"].as_str().unwrap(), list[1]["id"]);
    let ran = bench.run(&["delayed", "list", "orders", "--limit", "2"]).assert_ok();
    let hint = format!("2 shown of 4; for more: --after '{after}' ");
    assert!(ran.stderr.contains(&hint), "{}", ran.stderr);
    let rest = bench.json(&["delayed", "list", "orders", "--after", &after]);
    assert_eq!(rest.as_array().unwrap().as_slice(), &list.as_array().unwrap()[2..]);
    let after = format!("{}/{}", list[3]["deliver_at"].as_str().unwrap(), list[3]["id"]);
    let args = ["delayed", "list", "orders", "--after", &after];
    assert_eq!(bench.ok(&args).trim(), "no more delayed messages");
    bench.run(&["delayed", "list", "orders", "--after", "7"]).assert_error(2, &["TIME/ID"]);

    let id = list[1]["id"].to_string();
    let text = bench.ok(&["delayed", "cancel", "orders", &id]);
    assert_eq!(text.trim(), "cancelled 1 delayed message of stream \"orders\"");
    bench.run(&["delayed", "cancel", "orders", &id, "1"]).assert_error(3, &["not waiting", &id]);
    assert!(bench.ok(&["delayed", "list", "orders", "--limit", "1"]).contains("PAYLOAD"));
    bench.run_with(&["produce", "orders", "--delay", "0s"], b"5\n").assert_ok();
    assert_eq!(bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up"]), "5\n");
    let ran = bench.run_with(&["produce", "orders", "--expires-in", "1ms"], b"6\n").assert_ok();
    assert!(ran.stderr.contains("1 line stored"), "{}", ran.stderr);
    bench.run_with(&["produce", "orders", "--expires-at", "2999-01-01"], b"7\n").assert_ok();
    let ran = bench.run(&["consume", "orders", "-g", "g", "--until-caught-up"]).assert_ok();
    assert_eq!(ran.text(), "7\n");
    assert!(ran.stderr.contains("1 handled, 1 expired, in"), "{}", ran.stderr);
    for (flag, value) in
        [("--delay", "soon"), ("--delay", "15"), ("--deliver-at", "noon"), ("--expires-in", "0s")]
    {
        bench.run(&["produce", "orders", flag, value]).assert_error(2, &[value]);
    }
}

#[test]
fn routing_keys_come_from_a_field() {
    let bench = Bench::with_orders("");
    bench.ok(&["group", "create", "orders", "paid", "--bind", "orders.*.paid"]);
    let lines = b"{\"on\":\"orders.eu.paid\"}\n{\"on\":\"orders.eu.sent\"}\n";
    bench.run_with(&["produce", "orders", "--routing-key-field", "on"], lines).assert_ok();
    let got = bench.ok(&["consume", "orders", "-g", "paid", "--until-caught-up"]);
    assert_eq!(got, "{\"on\":\"orders.eu.paid\"}\n");
    let args = ["produce", "orders", "--routing-key-field", "on"];
    bench.run_with(&args, b"{}\n").assert_error(1, &["line 1", "no field \"on\""]);
}

#[test]
fn many_lines_arrive_complete_and_in_order() {
    let bench = Bench::with_orders("");
    let lines: String =
        (0..20_000).map(|n| format!("{{\"n\":{n},\"text\":\"line {n}\"}}\n")).collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(lines.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap();
    let ran = bench.run(&["produce", "orders", path]).assert_ok();
    assert!(ran.stderr.contains("20,000 lines stored"), "{}", ran.stderr);

    let output = bench.run(&["consume", "orders", "-g", "g", "--until-caught-up"]).assert_ok();
    assert_eq!(sorted(&output.stdout), sorted(lines.as_bytes()));
    let one_by_one = bench.ok(&["consume", "orders", "-g", "h", "--until-caught-up", "-c", "1"]);
    assert!(one_by_one == lines, "not in the order of the lines");
}

#[test]
fn the_summary_is_told_as_json_too() {
    let bench = Bench::with_orders("");
    let ran = bench.run_with(&["produce", "orders", "--json"], b"1\n\n  \n2\n").assert_ok();
    let told: Value = serde_json::from_str(&ran.text()).unwrap();
    assert_eq!(
        (&told["stored"], &told["blank"], &told["first_id"], &told["last_id"]),
        (&json!(2), &json!(2), &json!(1), &json!(2))
    );
    let ran = bench.run_with(&["produce", "orders"], b"").assert_ok();
    assert!(ran.stderr.contains("0 lines stored"), "{}", ran.stderr);
}

#[test]
fn a_bad_line_is_named_and_its_batch_refused() {
    let bench = Bench::with_orders("");
    let lines: String = (1..=30)
        .map(|n| if n == 15 { "{\"n\": oops}\n".to_owned() } else { format!("{{\"n\":{n}}}\n") })
        .collect();
    bench.run_with(&["produce", "orders", "--batch", "10"], lines.as_bytes()).assert_error(
        1,
        &["line 15: ", "invalid input syntax", "10 lines were stored before", "from line 11"],
    );
    assert_eq!(bench.json(&["stream", "show", "orders"])["groups"], json!([]));
    assert_eq!(stored(&bench), 10);

    let ran = bench
        .run_with(&["produce", "orders", "--batch", "10", "--json"], lines.as_bytes())
        .assert_code(1);
    let error = ran.error();
    assert_eq!(error["code"], "invalid_message");
    assert_eq!(
        (&error["line"], &error["stored"], &error["next_line"]),
        (&json!(15), &json!(10), &json!(11))
    );
}

#[test]
fn bad_lines_are_skipped_when_asked() {
    let bench = Bench::with_orders("");
    let mut lines: Vec<u8> = Vec::new();
    for n in 1..=50 {
        match n {
            7 => lines.extend_from_slice(b"{\"n\":"),
            19 => lines.extend_from_slice(b"\xff"),
            20 => lines.extend_from_slice(b"{\"n\": \"a\0b\"}"),
            _ => lines.extend_from_slice(format!("{n}").as_bytes()),
        }
        lines.push(b'\n');
    }
    let ran = bench
        .run_with(&["produce", "orders", "--batch", "10", "--skip-invalid"], &lines)
        .assert_ok();
    for reason in ["line 7 skipped: ", "line 19 skipped: ", "line 20 skipped: ", "47 lines stored"]
    {
        assert!(ran.stderr.contains(reason), "{reason:?} is not in: {}", ran.stderr);
    }
    assert_eq!(stored(&bench), 47);
}

#[test]
fn keys_come_from_a_field() {
    let bench = Bench::with_orders("");
    let lines = b"{\"id\": \"a b\"}\n{\"id\": 42}\n{\"id\": 1.50, \"x\": {\"id\": 7}}\n";
    bench.run_with(&["produce", "orders", "--key-field", "id"], lines).assert_ok();
    let ran =
        bench.run(&["consume", "orders", "-g", "g", "--until-caught-up", "--json", "-c", "1"]);
    let keys: Vec<Value> = ran
        .text()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["key"].clone())
        .collect();
    assert_eq!(keys, ["a b", "42", "1.50"]);

    for (line, reason) in [
        ("{\"other\": 1}", "no field \"id\""),
        ("{\"id\": null}", "null"),
        ("[1]", "not a JSON object"),
        ("nonsense", "not JSON"),
    ] {
        let input = format!("{{\"id\": 1}}\n{line}\n");
        bench
            .run_with(&["produce", "orders", "--key-field", "id"], input.as_bytes())
            .assert_error(1, &["line 2: ", reason, "Nothing was stored"]);
    }
    let long = format!("{{\"id\": \"{}\"}}\n", "k".repeat(2_000));
    bench
        .run_with(&["produce", "orders", "--key-field", "id"], long.as_bytes())
        .assert_error(1, &["line 1: ", "2000 bytes", "1024"]);
}

#[test]
fn headers_are_given_or_come_from_a_field() {
    let bench = Bench::with_orders("");
    let produce = ["produce", "orders", "--headers", "{\"region\": \"eu\", \"n\": 1}"];
    bench.run_with(&produce, b"1\n").assert_ok();
    let both = [&produce[..], &["--headers-field", "h"]].concat();
    bench
        .run_with(&both, b"{\"h\": {\"n\": 2, \"deep\": {\"a\": null}}}\n{\"h\": {}}\n")
        .assert_ok();
    let ran =
        bench.run(&["consume", "orders", "-g", "g", "--until-caught-up", "--json", "-c", "1"]);
    let headers: Vec<Value> = ran
        .text()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["headers"].clone())
        .collect();
    assert_eq!(
        headers,
        [
            json!({"region": "eu", "n": 1}),
            json!({"region": "eu", "n": 2, "deep": {"a": null}}),
            json!({"region": "eu", "n": 1}),
        ]
    );
    for (line, reason) in [
        ("{\"other\": 1}", "no headers: there is no field \"h\""),
        ("{\"h\": null}", "is null, not an object"),
        ("{\"h\": [1]}", "is an array, not an object"),
        ("{\"h\": {\"a\": \"\\u0000\"}}", "U+0000"),
    ] {
        let args = ["produce", "orders", "--headers-field", "h"];
        bench.run_with(&args, line.as_bytes()).assert_error(1, &["line 1: ", reason]);
    }
    bench.run(&["produce", "orders", "--headers", "[1]"]).assert_error(2, &["not a JSON object"]);
}

#[test]
fn a_message_may_expect_the_latest() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "prices", "--compacted"]);
    let produce = ["produce", "prices", "--key-field", "of"];
    let send = |more: &[&str], lines: &str| {
        bench.run_with(&[&produce[..], more].concat(), lines.as_bytes())
    };
    send(&["--expect-latest", "0"], "{\"of\":\"a\"}\n{\"of\":\"b\"}\n").assert_ok();
    send(&["--expect-latest", "1"], "{\"of\":\"a\"}\n").assert_ok();
    send(&["--expect-latest", "1"], "{\"of\":\"a\"}\n")
        .assert_error(1, &["line 1: key 'a' has message 3", "1 is expected", "Nothing was stored"]);
    let refused = send(&["--expect-latest", "0", "--json"], "{\"of\":\"c\"}\n{\"of\":\"a\"}\n");
    let error = refused.assert_code(1).error();
    assert_eq!((&error["code"], &error["latest_id"]), (&json!("conflict"), &json!(3)), "{error}");
    assert!(error["message"].as_str().unwrap().starts_with("lines 1 to 2: key 'a'"), "{error}");

    let fields = ["--expect-latest-field", "was"];
    send(&fields, "{\"of\":\"a\",\"was\":3}\n{\"of\":\"c\",\"was\":null}\n").assert_ok();
    let lines = "{\"of\":\"b\",\"was\":2}\n{\"of\":\"a\",\"was\":3}\n{\"of\":\"c\",\"was\":0}\n";
    let refused = send(&[&fields[..], &["--batch", "1", "--json"]].concat(), lines).assert_code(1);
    let error = refused.error();
    assert_eq!(
        (&error["line"], &error["stored"], &error["next_line"]),
        (&json!(2), &json!(1), &json!(2))
    );
    send(&fields, "{\"of\":\"a\"}\n").assert_error(1, &["line 1: no id: there is no field"]);
    send(&["--expect-latest", "-1"], "").assert_error(2, &["--expect-latest"]);
    send(&["--expect-latest", "1", "--expect-latest-field", "was"], "")
        .assert_error(2, &["cannot be used with"]);
    let args = ["produce", "orders", "--create", "--expect-latest", "0"];
    bench.run_with(&args, b"1\n").assert_error(1, &["line 1: ", "not compacted"]);
}

#[test]
fn an_unknown_stream_is_named_and_can_be_created() {
    let bench = Bench::with_orders("");
    bench
        .run_with(&["produce", "ordres"], b"1\n")
        .assert_error(3, &["no stream \"ordres\"", "\"orders\"", "stream create", "--create"]);
    bench.run_with(&["produce", "new", "--create"], b"1\n").assert_ok();
    assert_eq!(bench.json(&["stream", "show", "new"])["payload_type"], "json");
    bench.run_with(&["produce", "new", "--create"], b"2\n").assert_ok();
    let text = ["produce", "text", "--create", "--payload-type", "text"];
    bench.run_with(&text, b"no JSON at all\n\n").assert_ok();
    // A blank line is a text like any other.
    assert_eq!(bench.json(&["stream", "show", "text"])["head"], 2);
    bench
        .run_with(&["produce", "new", "--create", "--payload-type", "text"], b"1\n")
        .assert_error(2, &["stores its payloads as json"]);
}

#[test]
fn a_file_that_cannot_be_read_is_refused_first() {
    let bench = Bench::new();
    bench
        .run(&["produce", "new", "/no/such/file", "--create"])
        .assert_error(2, &["/no/such/file", "No such file"]);
    bench.run(&["produce", "new", "/", "--create"]).assert_error(2, &["folder"]);
    bench.run(&["produce", "new", "--batch", "0"]).assert_error(2, &["at least 1"]);
    assert_eq!(bench.sql("SELECT to_regnamespace('sqlstreams') IS NULL"), "t");
}

#[test]
fn a_slow_input_is_sent_as_it_comes() {
    let bench = Bench::with_orders("");
    let mut child = bench
        .command(&["produce", "orders"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"1\n2\n3").unwrap();
    eventually("two lines are stored while the input is open", || stored(&bench) == 2);
    stdin.write_all(b"3\n").unwrap();
    eventually("the third is stored", || stored(&bench) == 3);
    drop(stdin);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_line_above_the_limit_is_named() {
    let bench = Bench::new();
    bench.ok(&["stream", "create", "big", "--payload-type", "bytea"]);
    let limit = 64 * 1024 * 1024;
    let mut lines = vec![b'x'; limit + 1];
    lines.extend_from_slice(b"\nsmall\n");
    bench
        .run_with(&["produce", "big"], &lines)
        .assert_error(1, &["line 1: ", "67108865 bytes", "64 MiB"]);
    let ran = run(&mut bench.command(&["produce", "big", "--skip-invalid"]), &lines).assert_ok();
    assert!(ran.stderr.contains("line 1 skipped") && ran.stderr.contains("1 line stored"));
    // One line feed less, and it just fits.
    lines.remove(0);
    bench.run_with(&["produce", "big"], &lines).assert_ok();
    assert_eq!(stored_in(&bench, "big"), 3);
}

fn stored(bench: &Bench) -> i64 {
    stored_in(bench, "orders")
}

fn stored_in(bench: &Bench, stream: &str) -> i64 {
    let id = bench.json(&["stream", "show", stream])["id"].clone();
    bench.sql(&format!("SELECT count(*) FROM sqlstreams.message_log_{id}")).parse().unwrap()
}
