//! Databases that cannot be used.

use crate::support::{Bench, cluster, program, run, sql};

const COMMANDS: [&[&str]; 4] = [
    &["stream", "list"],
    &["migrate"],
    &["produce", "orders"],
    &["consume", "orders", "--group", "g", "--until-caught-up"],
];

#[test]
fn none_given_is_explained() {
    for args in COMMANDS {
        run(&mut program(args), b"1\n").assert_error(
            2,
            &["no database given", "set DATABASE_URL or --database-url, or run `sqlstreams up`"],
        );
    }
    let ran =
        run(program(&["stream", "list", "--json"]).env("DATABASE_URL", ""), b"").assert_code(2);
    assert_eq!(ran.error()["code"], "no_database");
    assert!(ran.error()["hint"].as_str().unwrap().contains("sqlstreams up"));
}

#[test]
fn an_unreachable_one_is_named() {
    for args in COMMANDS {
        let mut command = program(args);
        command.env("DATABASE_URL", "postgres://me:secret@127.0.0.1:1/shop");
        let ran = run(&mut command, b"1\n").assert_error(4, &["127.0.0.1:1/shop", "refused"]);
        assert!(!ran.stderr.contains("secret"), "{}", ran.stderr);
    }
    let url = "postgres://me@no-such-host.invalid/shop";
    run(program(&["stream", "list"]).env("DATABASE_URL", url), b"")
        .assert_error(4, &["no-such-host.invalid"]);
    let ran =
        run(program(&["stream", "list", "--json"]).env("DATABASE_URL", url), b"").assert_code(4);
    assert_eq!(ran.error()["code"], "connection");
}

#[test]
fn a_string_that_makes_no_sense_is_refused() {
    for url in ["mysql://localhost/x", "host=a nonsense=1", "postgres://localhost:port/x"] {
        let ran =
            run(program(&["stream", "list", "--database-url", url]).env("DATABASE_URL", ""), b"");
        ran.assert_error(2, &[]);
    }
}

#[test]
fn a_wrong_password_or_database_is_told() {
    let bench = Bench::new();
    let wrong = bench.url.replace(cluster().password(), "not-the-password");
    let ran = run(program(&["stream", "list"]).env("DATABASE_URL", &wrong), b"")
        .assert_error(4, &["password authentication failed", "hint: ", "the password"]);
    assert!(!ran.stderr.contains("not-the-password"), "{}", ran.stderr);
    let missing = cluster().url("no_such_database");
    run(program(&["migrate"]).env("DATABASE_URL", &missing), b"")
        .assert_error(4, &["\"no_such_database\" does not exist", "create it"]);
}

#[test]
fn a_read_only_one_is_told_and_can_be_looked_at() {
    let bench = Bench::with_orders("1\n");
    bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up"]);
    bench.sql(&format!("ALTER DATABASE {} SET default_transaction_read_only = on", bench.database));
    let written: [&[&str]; 5] = [
        &["migrate"],
        &["stream", "create", "more"],
        &["produce", "orders"],
        &["consume", "orders", "-g", "g"],
        &["group", "drop", "orders", "g", "--yes"],
    ];
    for args in written {
        bench.run_with(args, b"1\n").assert_error(4, &["read", "only", "hint: "]);
    }
    assert_eq!(bench.json(&["stream", "list"])[0]["name"], "orders");
    bench.ok(&["group", "list", "orders"]);
    bench.ok(&["dead", "list", "orders", "-g", "g"]);
}

#[test]
fn a_lacking_privilege_is_told() {
    let bench = Bench::new();
    let role = format!("{}_role", bench.database);
    sql(&bench.url, &format!("CREATE ROLE {role} LOGIN PASSWORD 'pw'"));
    let port = cluster().port();
    let url = format!("postgres://{role}:pw@127.0.0.1:{port}/{}", bench.database);
    let as_role = |args: &[&str]| run(program(args).env("DATABASE_URL", &url), b"1\n");
    as_role(&["migrate"]).assert_error(4, &["install the schema", "permission denied", "hint: "]);
    // Installed by somebody else, but not for this role.
    bench.ok(&["stream", "create", "orders"]);
    as_role(&["produce", "orders"]).assert_error(4, &["permission denied", "hint: "]);
    let ran = as_role(&["stream", "list", "--json"]).assert_code(4);
    assert_eq!(ran.error()["code"], "permission_denied");
}

/// A schema whose name was mistyped is not made, but by what makes things.
#[test]
fn where_nothing_is_installed_commands_that_work_with_it_say_so() {
    let bench = Bench::with_orders("1\n");
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'typo'";
    let commands: [&[&str]; 14] = [
        &["maintain", "--once"],
        &["maintain"],
        &["maintain", "status"],
        &["consume", "orders", "-g", "g", "--until-caught-up"],
        &["produce", "orders"],
        &["stream", "import", "orders"],
        &["stream", "export", "orders"],
        &["stream", "export", "orders", "--group", "g"],
        &["stream", "compact", "orders"],
        &["stream", "retain", "orders"],
        &["stream", "list"],
        &["message", "remove", "orders", "k"],
        &["schedule", "create", "s", "orders", "--cron", "* * * * *", "--payload", "1"],
        &["group", "create", "orders", "g"],
    ];
    let line = b"{\"id\":1,\"produced_at\":\"2026-03-01T12:00:00Z\",\"payload\":1}\n";
    for args in commands {
        let ran = bench.run_with(&[args, &["--schema", "typo"]].concat(), line);
        let hint = "Run `sqlstreams migrate`, or check the database and the schema name";
        ran.assert_error(4, &["not installed in schema \"typo\"", hint]);
        assert_eq!(bench.sql(schemas), "0", "{args:?}");
    }
    let made: [&[&str]; 3] = [
        &["produce", "orders", "--create"],
        &["stream", "import", "orders", "--create"],
        &["stream", "create", "orders"],
    ];
    for (n, args) in made.into_iter().enumerate() {
        bench.run_with(&[args, &["--schema", &format!("s{n}")]].concat(), line).assert_ok();
    }
}
