//! `up` and `down`.

use serde_json::Value;

use crate::support::{program, run};

#[test]
fn a_kept_server_serves_the_other_commands_until_it_is_taken_down() {
    // Root's servers run under another account, which must get in.
    let dir = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .tempdir_in("/tmp")
        .unwrap();
    let home = dir.path().join("with blanks");
    let here = |args: &[&str]| run(program(args).env("SQLSTREAMS_UP_DIR", &home), b"");

    let ran = here(&["down"]).assert_ok();
    assert!(ran.text().contains("no PostgreSQL"), "{}", ran.text());
    let ran = here(&["up"]).assert_ok();
    let url = ran.text().trim().to_owned();
    assert!(url.starts_with("postgres://") && url.lines().count() == 1, "{url}");
    assert!(ran.stderr.contains("sqlstreams down"), "{}", ran.stderr);

    let again: Value = serde_json::from_str(&here(&["up", "--json"]).assert_ok().text()).unwrap();
    assert_eq!((&again["url"], &again["already_running"]), (&url.as_str().into(), &true.into()));

    // No DATABASE_URL here.
    let ran = here(&["stream", "create", "orders"]).assert_ok();
    assert!(ran.stderr.contains("`sqlstreams up`"), "{}", ran.stderr);
    here(&["stream", "show", "orders", "--json"]).assert_ok();

    let ran = here(&["down", "--json"]).assert_ok();
    assert_eq!(serde_json::from_str::<Value>(&ran.text()).unwrap()["stopped"], true);
    here(&["stream", "list"]).assert_error(2, &["no database given"]);

    // What was stored is there again, at the same address.
    let ran = here(&["up"]).assert_ok();
    assert_eq!(ran.text().trim(), url);
    let ran = here(&["stream", "list", "--json"]).assert_ok();
    assert_eq!(serde_json::from_str::<Value>(&ran.text()).unwrap()[0]["name"], "orders");
    assert_eq!(ran.stderr, "");
    here(&["down"]).assert_ok();
}

#[test]
fn a_folder_without_programs_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().to_str().unwrap();
    run(&mut program(&["up", "--pg-bin", empty]), b"").assert_error(2, &[empty, "initdb"]);
}
