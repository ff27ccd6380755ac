//! What the program says about itself.

use crate::support::{program, run};

const COMMANDS: [&[&str]; 41] = [
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
    &["group", "drop"],
    &["dead", "list"],
    &["dead", "show"],
    &["dead", "redrive"],
    &["dead", "discard"],
    &["message"],
    &["message", "latest"],
    &["message", "current"],
    &["message", "remove"],
    &["bench"],
    &["bench", "latency"],
    &["bench", "transactional"],
    &["bench", "routing"],
    &["bench", "chaos"],
];

#[test]
fn every_command_has_help() {
    for command in COMMANDS {
        let args: Vec<&str> = command.iter().copied().chain(["--help"]).collect();
        let ran = run(&mut program(&args), b"").assert_ok();
        let text = ran.text();
        assert!(text.contains("Usage: sqlstreams"), "{text}");
        let is_leaf =
            !matches!(command, [] | ["demo"] | ["stream"] | ["group"] | ["message"] | ["bench"]);
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
