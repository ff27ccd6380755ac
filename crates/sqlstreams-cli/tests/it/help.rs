//! What the program says about itself.

use crate::support::{program, run};

const COMMANDS: [&[&str]; 79] = [
    &[],
    &["demo"],
    &["up"],
    &["down"],
    &["migrate"],
    &["stream"],
    &["stream", "create"],
    &["stream", "list"],
    &["stream", "show"],
    &["stream", "alter"],
    &["stream", "compact"],
    &["stream", "retain"],
    &["stream", "export"],
    &["stream", "import"],
    &["stream", "drop"],
    &["produce"],
    &["consume"],
    &["group"],
    &["group", "list"],
    &["group", "show"],
    &["group", "create"],
    &["group", "alter"],
    &["group", "bindings"],
    &["group", "bindings", "set"],
    &["group", "bindings", "add"],
    &["group", "bindings", "remove"],
    &["group", "bindings", "history"],
    &["group", "bindings", "test"],
    &["group", "pause"],
    &["group", "resume"],
    &["group", "seek"],
    &["group", "replay"],
    &["group", "replay", "list"],
    &["group", "replay", "cancel"],
    &["group", "drop"],
    &["dead", "list"],
    &["dead", "show"],
    &["dead", "redrive"],
    &["dead", "discard"],
    &["delayed"],
    &["delayed", "list"],
    &["delayed", "cancel"],
    &["message"],
    &["message", "latest"],
    &["message", "current"],
    &["message", "remove"],
    &["maintain"],
    &["maintain", "status"],
    &["schedule"],
    &["schedule", "create"],
    &["schedule", "list"],
    &["schedule", "show"],
    &["schedule", "alter"],
    &["schedule", "next"],
    &["schedule", "run"],
    &["schedule", "pause"],
    &["schedule", "resume"],
    &["schedule", "history"],
    &["schedule", "drop"],
    &["doctor"],
    &["bench"],
    &["bench", "all"],
    &["bench", "produce"],
    &["bench", "consume"],
    &["bench", "pipeline"],
    &["bench", "latency"],
    &["bench", "fanout"],
    &["bench", "failures"],
    &["bench", "horizon"],
    &["bench", "idle"],
    &["bench", "transactional"],
    &["bench", "ordered"],
    &["bench", "fair"],
    &["bench", "routing"],
    &["bench", "keys"],
    &["bench", "delay"],
    &["bench", "growth"],
    &["bench", "soak"],
    &["bench", "chaos"],
];

#[test]
fn every_command_has_help() {
    for command in COMMANDS {
        let args: Vec<&str> = command.iter().copied().chain(["--help"]).collect();
        let ran = run(&mut program(&args), b"").assert_ok();
        let text = ran.text();
        assert!(text.contains("Usage: sqlstreams"), "{text}");
        let is_leaf = !matches!(
            command,
            [] | ["demo"]
                | ["stream"]
                | ["group"]
                | ["delayed"]
                | ["message"]
                | ["schedule"]
                | ["bench"]
        );
        assert!(!is_leaf || text.contains("Examples:"), "{command:?} has no examples");
    }
    let text = run(&mut program(&["--help"]), b"").text();
    assert!(text.contains("Exit codes:") && text.contains("First steps:"));
}

#[test]
fn what_is_mistyped_is_told() {
    run(&mut program(&["strem", "list"]), b"").assert_error(2, &["'strem'", "'stream'"]);
    run(&mut program(&["stream", "list", "--jsn"]), b"").assert_error(2, &["--json"]);
    let ran = run(&mut program(&["stream", "lst", "--json"]), b"").assert_code(2);
    assert_eq!(ran.error()["code"], "usage");
    assert!(ran.error()["message"].as_str().unwrap().contains("'lst'"));
}

#[test]
fn help_is_wrapped_once() {
    for (command, columns) in
        COMMANDS.iter().flat_map(|command| [60, 80, 100].map(|c| (command, c)))
    {
        let args: Vec<&str> = command.iter().copied().chain(["--help"]).collect();
        let text = run(program(&args).env("COLUMNS", columns.to_string()), b"").text();
        let lines: Vec<&str> = text.lines().collect();
        // In prose, the first word of a line did not fit on the line before.
        let prose = |line: &str| !line.is_empty() && !line.starts_with(' ');
        for pair in lines.windows(2).filter(|pair| prose(pair[0]) && prose(pair[1])) {
            let word = pair[1].split(' ').next().unwrap_or_default();
            let room = columns - pair[0].chars().count();
            assert!(
                word.chars().count() + 1 > room,
                "{command:?} at {columns}:\n{}\n{}",
                pair[0],
                pair[1]
            );
        }
    }
}

#[test]
fn values_may_begin_with_a_minus() {
    for (args, said) in [
        (&["produce", "s", "--delay", "-1s"][..], "longer than nothing"),
        (&["produce", "s", "--deliver-at", "-1"], "write a time"),
        (&["produce", "s", "--batch", "-1"], "not a whole number"),
        (&["produce", "s", "--expect-latest", "-1"], "not in 0.."),
        (&["consume", "s", "-g", "g", "--from", "-1"], "ids begin at 1"),
        (&["consume", "s", "-g", "g", "--timeout", "-1s"], "longer than nothing"),
        (&["consume", "s", "-g", "g", "--max-attempts", "-1"], "not in 1.."),
        (&["group", "create", "s", "g", "--backoff-cap", "-1s"], "longer than nothing"),
        (&["group", "seek", "s", "g", "-1"], "ids begin at 1"),
        (&["group", "replay", "s", "g", "--upto", "-1"], "ids begin at 1"),
        (&["group", "create", "s", "g", "--max-in-flight", "-1"], "-1 is not in"),
        (&["stream", "create", "s", "--idempotency-window", "-1d"], "longer than nothing"),
        (&["stream", "compact", "s", "--min-age", "-1s"], "longer than nothing"),
        (&["stream", "alter", "s", "--retain-for", "-1s"], "longer than nothing"),
        (&["stream", "create", "s", "--retain-bytes", "-1"], "whole number"),
        (&["dead", "list", "s", "-g", "g", "--after", "-1"], "not in 0.."),
        (&["stream", "export", "s", "--from", "-1"], "ids begin at 1"),
        (&["stream", "import", "s", "--after", "-1"], "not in 0.."),
        (&["dead", "list", "s", "-g", "g", "--limit", "-1"], "not in 1.."),
        (&["dead", "redrive", "s", "-g", "g", "-1"], "not in 1.."),
        (&["delayed", "list", "s", "--after", "-1"], "write a time and an id"),
        (&["delayed", "cancel", "s", "-1"], "not in 1.."),
        (&["message", "current", "s", "--limit", "-1"], "not in 1.."),
        (&["bench", "delay", "--for", "-1s"], "longer than nothing"),
    ] {
        let ran = run(&mut program(args), b"").assert_error(2, &[said]);
        assert!(!ran.stderr.contains("tip:"), "{args:?}: {}", ran.stderr);
    }
}

#[test]
fn usage_lines_do_not_ask_for_what_the_environment_has() {
    let mut command = program(&["stream", "show"]);
    command.env("DATABASE_URL", "x").env("SQLSTREAMS_SCHEMA", "y").env("SQLSTREAMS_PG_BIN", "z");
    let ran = run(&mut command, b"").assert_error(2, &["Usage: sqlstreams stream show <NAME>"]);
    assert!(!ran.stderr.contains("--up-dir"), "{}", ran.stderr);
    let text = run(program(&["stream", "show", "--help"]).env("COLUMNS", "300"), b"").text();
    for named in ["[env: DATABASE_URL]", "[env: SQLSTREAMS_SCHEMA]", "[default: sqlstreams]"] {
        assert!(text.contains(named), "{named}: {text}");
    }
}
