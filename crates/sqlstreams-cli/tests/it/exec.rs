//! Consuming by a command per message.

use std::time::Instant;

use serde_json::json;

use crate::support::{Bench, LEASE, run};

#[test]
fn the_command_gets_the_payload_and_what_goes_with_it() {
    let bench = Bench::with_orders("");
    let lines = b"{\"id\": \"k 1\"}\n{\"id\": 2}\n";
    bench.run_with(&["produce", "orders", "--key-field", "id"], lines).assert_ok();
    bench.run_with(&["produce", "orders"], b"3\n").assert_ok();
    let script = "printf '%s|%s|%s|%s|%s|' \"$SQLSTREAMS_ID\" \"${SQLSTREAMS_KEY-none}\" \"$SQLSTREAMS_ATTEMPT\" \"$SQLSTREAMS_STREAM\" \"$SQLSTREAMS_GROUP\"; cat; echo";
    let args =
        ["consume", "orders", "-g", "g 1", "--until-caught-up", "--exec", "sh", "-c", script];
    assert_eq!(
        bench.ok(&args),
        "1|k 1|1|orders|g 1|{\"id\": \"k 1\"}\n2|2|1|orders|g 1|{\"id\": 2}\n3|none|1|orders|g 1|3\n"
    );
}

#[test]
fn the_command_gets_routing_keys_and_headers() {
    let bench = Bench::with_orders("");
    let lines = b"{\"to\": \"orders.eu\", \"h\": {\"n\": [1, \"two\"]}}\n";
    let fields = ["--routing-key-field", "to", "--headers-field", "h"];
    bench.run_with(&[&["produce", "orders"][..], &fields].concat(), lines).assert_ok();
    bench.run_with(&["produce", "orders"], b"2\n").assert_ok();
    let script = "echo \"${SQLSTREAMS_ROUTING_KEY-none}|${SQLSTREAMS_HEADERS-none}\"";
    let args = ["consume", "orders", "-g", "g", "--until-caught-up", "--exec", "sh", "-c", script];
    let mut command = bench.command(&args);
    command.env("SQLSTREAMS_ROUTING_KEY", "outer").env("SQLSTREAMS_HEADERS", "outer");
    let ran = run(&mut command, b"").assert_ok();
    assert_eq!(ran.text(), "orders.eu|{\"n\":[1,\"two\"]}\nnone|none\n");
}

#[test]
fn headers_that_no_environment_takes_hold_up_nobody() {
    let bench = Bench::with_orders("");
    let line = |length: usize| {
        let header = "x".repeat(length - "{\"h\":\"\"}".len());
        format!("{{\"h\": {{\"h\":\"{header}\"}}}}\n")
    };
    let most = 127 * 1024;
    let lines = format!("{}{}1\n", line(most), line(most + 1));
    let args = ["produce", "orders", "--headers-field", "h", "--skip-invalid"];
    bench.run_with(&args, lines.as_bytes()).assert_ok();
    let script = "printf %s \"$SQLSTREAMS_HEADERS\" | wc -c";
    let args = ["consume", "orders", "-g", "g", "--until-caught-up", "--exec", "sh", "-c", script];
    assert_eq!(bench.ok(&args).trim(), most.to_string());
    let dead = bench.json(&["dead", "list", "orders", "-g", "g"]);
    assert_eq!((&dead[0]["id"], &dead[0]["attempts"]), (&json!(2), &json!(1)), "{dead}");
    assert!(dead[0]["error"].as_str().unwrap().contains("130049 bytes of headers"), "{dead}");
}

#[test]
fn exit_codes_decide() {
    let bench = Bench::with_orders("\"fine\"\n\"dead\"\n\"flaky\"\n\"killed\"\n\"silent\"\n");
    let script = r#"
        case "$(cat)" in
            '"fine"') ;;
            '"dead"') echo 'no such customer' >&2; exit 65 ;;
            '"flaky"') [ "$SQLSTREAMS_ATTEMPT" -ge 2 ] || { echo 'busy' >&2; exit 1; } ;;
            '"killed"') kill -9 $$ ;;
            '"silent"') exit 65 ;;
        esac"#;
    let args = [
        "consume",
        "orders",
        "-g",
        "g",
        "--until-caught-up",
        "--max-attempts",
        "2",
        "--concurrency",
        "3",
        "--exec",
        "sh",
        "-c",
        script,
    ];
    let ran = bench.run(&args).assert_ok();
    assert!(ran.stderr.contains("2 handled"), "{}", ran.stderr);
    let letters = bench.json(&["dead", "list", "orders", "-g", "g"]);
    let told: Vec<_> = letters
        .as_array()
        .unwrap()
        .iter()
        .map(|l| (l["id"].clone(), l["error"].clone(), l["attempts"].clone()))
        .collect();
    assert_eq!(
        told,
        [
            (json!(2), json!("no such customer"), json!(1)),
            (json!(4), json!("killed by signal 9"), json!(2)),
            (json!(5), json!("exit code 65"), json!(1)),
        ]
    );
}

#[test]
fn stderr_is_kept_in_reason() {
    let bench = Bench::with_orders("1\n");
    let script =
        "head -c 100000 /dev/zero | tr '\\0' 'x' >&2; printf 'a\\0b\\377 the end' >&2; exit 65";
    let args = ["consume", "orders", "-g", "g", "--until-caught-up", "--exec", "sh", "-c", script];
    bench.run(&args).assert_ok();
    let error = bench.json(&["dead", "show", "orders", "1", "-g", "g"])["error"].clone();
    let error = error.as_str().unwrap();
    assert!(error.len() <= 8 * 1024 && error.ends_with("a\u{fffd}b\u{fffd} the end"), "{error}");
}

#[test]
fn a_command_need_not_read_and_may_leave_something_running() {
    let megabyte = format!("\"{}\"\n", "x".repeat(1_000_000));
    let bench = Bench::with_orders(&megabyte);
    let args = ["consume", "orders", "-g", "g", "--until-caught-up", "--exec"];
    let begun = Instant::now();
    let run = |group: &str, command: &[&str]| {
        let mut all = args.to_vec();
        all[3] = group;
        all.extend(command);
        bench.run(&all).assert_ok()
    };
    assert!(run("a", &["true"]).stderr.contains("1 handled"));
    assert!(run("b", &["sh", "-c", "sleep 30 > /dev/null & exit 0"]).stderr.contains("1 handled"));
    assert!(begun.elapsed().as_secs() < 15, "waited for what was left running");
    assert_eq!(run("c", &["wc", "-c"]).text().trim(), "1000002");
}

#[test]
fn a_command_that_takes_too_long_is_ended() {
    let bench = Bench::with_orders("1\n");
    let args = [
        "consume",
        "orders",
        "-g",
        "g",
        "--until-caught-up",
        "--max-attempts",
        "1",
        "--timeout",
        "300ms",
        "--exec",
        "sleep",
        "60",
    ];
    let begun = Instant::now();
    bench.run(&args).assert_ok();
    assert!(begun.elapsed().as_secs() < 20);
    let error = bench.json(&["dead", "show", "orders", "1", "-g", "g"])["error"].clone();
    assert!(error.as_str().unwrap().contains("longer than 300ms"), "{error}");
}

#[test]
fn a_command_that_is_not_there_spends_no_attempts() {
    let bench = Bench::with_orders("1\n");
    let args = ["consume", "orders", "-g", "g", "--exec", "no-such-program", "--flag"];
    bench.run(&args).assert_error(2, &["no-such-program", "no such program"]);
    let args = ["consume", "orders", "-g", "g", "--exec", "/etc/passwd"];
    bench.run(&args).assert_error(2, &["/etc/passwd", "may not be run"]);
    assert_eq!(bench.json(&["group", "list", "orders"]), json!([]));

    // One that goes while it is used.
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("once");
    std::fs::write(&script, "#!/bin/sh\nrm \"$0\"\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    bench.run_with(&["produce", "orders"], b"2\n3\n").assert_ok();
    let args = ["consume", "orders", "-g", "g", "--exec", script.to_str().unwrap()];
    bench.run(&args).assert_error(1, &["cannot run", "once", "No such file"]);
    let status = bench.json(&["group", "show", "orders", "g"]);
    assert_eq!((&status["ready"], &status["dead"]), (&json!(0), &json!(0)), "{status}");
    let begun = Instant::now();
    assert_eq!(
        bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up", "-c", "1"]),
        "2\n3\n"
    );
    assert!(begun.elapsed() < LEASE, "the messages were not handed back");
}
