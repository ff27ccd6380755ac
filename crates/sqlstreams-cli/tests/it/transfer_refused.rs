//! What an export and an import refuse at once, and what odd things they take along.

use std::fs;
use std::process::Command;

use serde_json::json;

use crate::support::Bench;

/// A path in a folder that goes when the test ends.
fn in_folder(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).to_str().unwrap().to_owned()
}

#[test]
fn nothing_is_told_from_an_export_of_nothing() {
    let (bench, folder) = (Bench::with_orders(""), tempfile::tempdir().unwrap());
    let import = ["stream", "import", "copy", "--create"];
    let empty = ["is empty", "no export of nothing", "a first and a last line"];
    for input in ["", "\n", "\n  \r\n\t\n"] {
        let ran = bench.run_with(&import, input.as_bytes());
        ran.assert_error(1, &[&empty[..], &["stdin"]].concat());
        let file = in_folder(&folder, "empty.jsonl");
        fs::write(&file, input).unwrap();
        let ran = bench.run(&[&import[..], &[&file]].concat());
        ran.assert_error(1, &[&empty[..], &["empty.jsonl"]].concat());
    }
    let ran = bench.run_with(&[&import[..], &["--json"]].concat(), b"").assert_code(1);
    assert_eq!(ran.error()["code"], "empty_input");
    assert!(!bench.ok(&["stream", "list"]).contains("copy"), "made for nothing");

    // An export of nothing has a beginning and an end, and has to have both.
    let export = bench.ok(&["stream", "export", "orders"]);
    assert_eq!(export.lines().count(), 2, "{export}");
    let (first, last) = export.split_once('\n').unwrap();
    bench.run_with(&import, format!("{first}\n").as_bytes()).assert_error(1, &["cut off"]);
    bench.run_with(&import, first.as_bytes()).assert_error(1, &["cut off"]);
    bench.run_with(&import, &first.as_bytes()[..40]).assert_error(1, &["line 1", "EOF"]);
    let of_some = last.replace("\"messages\":0", "\"messages\":7");
    bench
        .run_with(&import, of_some.as_bytes())
        .assert_error(1, &["line 1", "has 7 messages, and 0 came"]);
    for whole in [export.clone(), format!("\n \n{export}\n")] {
        let ran = bench.run_with(&import, whole.as_bytes()).assert_ok();
        assert!(ran.text().contains("imported 0 messages"), "{}", ran.text());
    }
    let file = in_folder(&folder, "nothing.parquet");
    bench.ok(&["stream", "export", "orders", "--output", &file]);
    assert_eq!(bench.json(&["stream", "import", "copy", &file])["stored"], 0);
}

/// Blank lines count where lines are named.
#[test]
fn lines_are_counted_from_the_first_also_where_that_is_blank() {
    let bench = Bench::with_orders("1\n");
    let export = format!("\n\n{}", bench.ok(&["stream", "export", "orders"]));
    let wrong = export.replace("\"payload\"", "\"paylod\"");
    bench
        .run_with(&["stream", "import", "copy", "--create"], wrong.as_bytes())
        .assert_error(1, &["line 4"]);
    bench.run_with(&["stream", "import", "copy"], export.as_bytes()).assert_ok();
}

#[test]
fn a_parquet_file_is_not_read_from_a_pipe() {
    let (bench, folder) = (Bench::with_orders("1\n2\n"), tempfile::tempdir().unwrap());
    let file = in_folder(&folder, "orders.parquet");
    bench.ok(&["stream", "export", "orders", "--output", &file]);
    let import = ["stream", "import", "copy", "--create"];
    let ran = bench.run_with(&import, &fs::read(&file).unwrap());
    ran.assert_error(2, &["stdin brings a Parquet file", "name the file"]);
    assert!(!bench.ok(&["stream", "list"]).contains("copy"), "made for what cannot be read");

    // A pipe that has a name loses nothing by being looked at.
    let pipe = in_folder(&folder, "pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for (lines, code) in [(true, 0), (false, 2)] {
        let bytes = match lines {
            true => bench.ok(&["stream", "export", "orders"]).into_bytes(),
            false => fs::read(&file).unwrap(),
        };
        let feeder = std::thread::spawn({
            let pipe = pipe.clone();
            // It may end before it has read everything.
            move || drop(fs::write(pipe, bytes))
        });
        let ran = bench.run(&[&import[..], &[&pipe]].concat()).assert_code(code);
        assert!(code == 0 || ran.stderr.contains("pipe brings a Parquet file"), "{}", ran.stderr);
        feeder.join().unwrap();
    }
    assert_eq!(bench.sql("SELECT count(*) FROM sqlstreams.message_log_2"), "2");
}

#[test]
fn a_group_that_cannot_remember_is_refused_before_anything_is_written() {
    let (bench, folder) = (Bench::with_orders("1\n2\n"), tempfile::tempdir().unwrap());
    let file = in_folder(&folder, "orders.jsonl");
    for mode in ["ordered", "fair"] {
        bench.ok(&["group", "create", "orders", mode, "--mode", mode]);
        let export = ["stream", "export", "orders", "--group", mode];
        let ran = bench.run(&[&export[..], &["--output", &file]].concat());
        ran.assert_error(2, &[mode, "only a parallel one", "exports alone"]);
        let ran = bench.run(&export).assert_code(2);
        assert_eq!(ran.text(), "", "something was written");
        assert_eq!(bench.json(&["group", "show", "orders", mode])["claimed"], 0);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

    // Nor without the privilege to move it.
    bench.ok(&["group", "create", "orders", "archive"]);
    let role = format!("{}_reader", bench.database);
    bench.sql(&format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'pw'; GRANT USAGE ON SCHEMA sqlstreams TO {role};
         GRANT SELECT ON ALL TABLES IN SCHEMA sqlstreams TO {role}; GRANT SELECT ON ALL SEQUENCES IN SCHEMA sqlstreams TO {role}"
    ));
    let (_, host) = bench.url.rsplit_once('@').unwrap();
    let url = format!("postgres://{role}:pw@{host}");
    let export = ["stream", "export", "orders", "--database-url", &url];
    bench.run(&export).assert_ok();
    let ran = bench.run(&[&export[..], &["--group", "archive"]].concat());
    let ran = ran.assert_error(4, &["permission denied"]);
    assert_eq!(ran.text(), "", "something was written");
}

#[test]
fn a_range_that_ends_before_it_begins_is_refused() {
    let bench = Bench::with_orders(&"1\n".repeat(30));
    bench.sql("UPDATE sqlstreams.message_log_1 SET produced_at = '2026-01-01T00:00:00Z'::timestamptz + id * interval '1 hour'");
    let (third, tenth) = ("2026-01-01T03:00:00Z", "2026-01-01T10:00:00Z");
    for (from, to) in [
        ("5", "2"),
        (tenth, third),
        (tenth, tenth),
        ("1h ago", "2h ago"),
        ("latest", "5"),
        ("latest", third),
        ("1", "beginning"),
        ("20", third),
        (tenth, "5"),
    ] {
        let ran = bench.run(&["stream", "export", "orders", "--from", from, "--to", to]);
        let ran = ran.assert_error(2, &["the range ends before it begins", "--from", "--to"]);
        assert_eq!(ran.text(), "", "{from} to {to}");
    }
    // What may be there one day is no mistake.
    for (from, to) in [("40", "50"), ("31", tenth), ("5", "5"), ("latest", "latest")] {
        bench.ok(&["stream", "export", "orders", "--from", from, "--to", to]);
    }
    bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up"]);
    for (from, upto) in [("5", "2"), (tenth, third), (tenth, tenth), ("20", third), (tenth, "5")] {
        for how in [&[][..], &["--preview"]] {
            let replay = ["group", "replay", "orders", "g", "--from", from, "--upto", upto];
            let ran = bench.run(&[&replay[..], how].concat());
            ran.assert_error(2, &["the range ends before it begins"]);
        }
    }
    for (from, upto) in [("10", tenth), ("40", third), ("31", "50"), ("latest", "50")] {
        let replay =
            ["group", "replay", "orders", "g", "--from", from, "--upto", upto, "--preview"];
        let code = if from == "latest" { 2 } else { 0 };
        bench.run(&replay).assert_code(code);
    }
}

/// Which plain SQL can store.
#[test]
fn infinite_times_go_along() {
    let (bench, folder) = (Bench::with_orders(""), tempfile::tempdir().unwrap());
    bench.sql(
        "INSERT INTO sqlstreams.message_log_1 (produced_at, expires_at, payload) VALUES
         ('-infinity', NULL, '1'), ('infinity', 'infinity', '2'), ('0044-03-15 BC', '-infinity', '3')",
    );
    let whole = |id: u32| {
        bench.sql(&format!(
            "SELECT string_agg(concat_ws(' ', id, produced_at, expires_at, payload), ', ' ORDER BY id) FROM sqlstreams.message_log_{id}"
        ))
    };
    for (n, format) in [(2, "jsonl"), (3, "parquet")] {
        let file = in_folder(&folder, &format!("orders.{format}"));
        bench.ok(&["stream", "export", "orders", "--output", &file]);
        let import = ["stream", "import", format, &file, "--create", "--keep-ids"];
        assert_eq!(bench.json(&import)["stored"], 3, "{format}");
        assert_eq!(whole(n), whole(1), "{format}");
        assert_eq!(bench.json(&import)["skipped"], 3, "{format}");
    }
    let got = bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up", "--json"]);
    assert!(got.contains("\"-infinity\"") && got.contains("\"infinity\""), "{got}");
    let ran = bench.run_with(&["stream", "import", "jsonl", "--json"], got.as_bytes());
    assert_eq!(
        serde_json::from_slice::<serde_json::Value>(&ran.assert_ok().stdout).unwrap()["stored"],
        json!(2)
    );
    bench.ok(&["stream", "export", "orders", "--from", "2h ago"]);
    bench.ok(&["stream", "retain", "orders"]);
    bench.ok(&["maintain", "--once"]);
}
