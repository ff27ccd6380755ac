//! Streams to files and back.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{Bench, eventually, signal};

/// The lines of an export that are messages.
fn messages(export: &str) -> Vec<&str> {
    export.lines().filter(|line| line.starts_with("{\"id\"")).collect()
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

#[test]
fn a_stream_goes_to_another_database_and_nothing_is_lost() {
    let (from, folder) = (Bench::new(), Folder::new());
    for (payload_type, values) in [
        (
            "json",
            r#"('{"a":  1e400}'), (E'[1,\n 2]'), (' "x" '), ('null'), ('"\u0000"'), (to_json(repeat('é', 600000)))"#,
        ),
        (
            "jsonb",
            r#"('{"b": 12345678901234567890.5}'), ('null'), (to_jsonb(repeat('é', 600000)))"#,
        ),
        ("text", r#"('plain'), (''), (E'a\r\n"b"\t\u2028'), (repeat('🦀', 300000))"#),
        ("bytea", r#"('\x00ff'), (''), (decode(repeat('00fe', 500000), 'hex'))"#),
    ] {
        from.ok(&[
            "stream",
            "create",
            payload_type,
            "--payload-type",
            payload_type,
            "--compacted",
            "--partition-size",
            "2000",
        ]);
        let id =
            from.sql(&format!("SELECT id FROM sqlstreams.stream WHERE name = '{payload_type}'"));
        let log = format!("sqlstreams.message_log_{id}");
        from.sql(&format!(
            "SELECT setval('{log}_id_seq', 1500);
             INSERT INTO {log} (key, payload) SELECT 'k', x::{payload_type} FROM (VALUES {values}) AS v(x);
             INSERT INTO {log} (key, routing_key, headers, produced_at, expires_at) VALUES ('gone', 'a.b', '{{\"n\": 0.10}}', '0044-03-15 BC', 'infinity');
             INSERT INTO {log} (key, headers, produced_at, expires_at, payload) SELECT '', '{{}}', '2001-02-03 04:05:06.789012Z', '20000-01-01', payload FROM {log} LIMIT 1"
        ));
        for format in ["jsonl", "parquet"] {
            let file = folder.path(&format!("{payload_type}.{format}"));
            let told = from.json(&["stream", "export", payload_type, "--output", &file]);
            let count = told["messages"].as_u64().unwrap();
            let to = Bench::new();
            let done = to.json(&["stream", "import", "copy", &file, "--create", "--keep-ids"]);
            assert_eq!((done["stored"].as_u64(), &done["first_id"]), (Some(count), &json!(1501)));
            let (before, after) = (
                from.ok(&["stream", "export", payload_type]),
                to.ok(&["stream", "export", "copy"]),
            );
            assert!(messages(&before) == messages(&after), "{payload_type} as {format}");
            assert_eq!(messages(&after).len() as u64, count);
            let sum = |log: &str| {
                format!("SELECT md5(string_agg(m::text, E'\\n' ORDER BY id)) FROM {log} AS m")
            };
            assert_eq!(from.sql(&sum(&log)), to.sql(&sum("sqlstreams.message_log_1")));
            let info = to.json(&["stream", "show", "copy"]);
            let stream = info.get("stream").unwrap_or(&info);
            assert_eq!(
                (&stream["compacted"], &stream["partition_size"]),
                (&json!(true), &json!(2000))
            );
            // Again: all of it is there. Under new ids: behind it.
            let again = to.json(&["stream", "import", "copy", &file, "--keep-ids"]);
            assert_eq!(
                (again["stored"].as_u64(), again["skipped"].as_u64()),
                (Some(0), Some(count))
            );
            let more = to.json(&["stream", "import", "copy", &file]);
            assert_eq!(more["first_id"].as_u64(), Some(1501 + count));
        }
    }
    assert_eq!(folder.names().len(), 8);
}

#[test]
fn ranges_are_of_ids_and_times() {
    let bench = Bench::with_orders(&"1\n".repeat(30));
    bench.sql("UPDATE sqlstreams.message_log_1 SET produced_at = '2026-01-01T00:00:00Z'::timestamptz + id * interval '1 hour'");
    let ids = |args: &[&str]| {
        let all = [&["stream", "export", "orders"], args].concat();
        let text = bench.ok(&all);
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(
            lines[0]["export"]["payload_type"] == "json"
                && lines.last().unwrap()["end"]["messages"] == lines.len() - 2
        );
        lines[1..lines.len() - 1]
            .iter()
            .map(|line| line["id"].as_i64().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(&[]), (1..=30).collect::<Vec<_>>());
    assert_eq!(ids(&["--from", "5", "--to", "7"]), [5, 6, 7]);
    assert_eq!(ids(&["--from", "29", "--to", "latest"]), [29, 30]);
    assert_eq!(ids(&["--from", "2026-01-01T03:00:00Z", "--to", "2026-01-01T06:00:00Z"]), [3, 4, 5]);
    assert_eq!(ids(&["--from", "40"]), [0; 0]);
    bench.run(&["stream", "export", "nope"]).assert_error(3, &["no stream \"nope\""]);
}

#[test]
fn what_consume_prints_can_be_imported() {
    let bench = Bench::with_orders("{\"n\": 1}\n{\"n\":2.50}\n");
    let printed = bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up", "--json"]);
    bench
        .run_with(&["stream", "import", "copy", "--create", "--keep-ids"], printed.as_bytes())
        .assert_ok();
    assert_eq!(
        bench
            .sql("SELECT string_agg(payload::text, ' ' ORDER BY id) FROM sqlstreams.message_log_2"),
        "{\"n\": 1} {\"n\":2.50}"
    );
}

#[test]
fn a_line_that_cannot_be_stored_is_named_and_the_import_goes_on_after_it() {
    let lines: Vec<String> = (1..=2500)
        .map(|n| {
            format!("{{\"id\":{n},\"produced_at\":\"2026-03-01T12:00:00Z\",\"payload\":{n}}}\n")
        })
        .collect();
    let good = lines.concat();
    let mut broken = lines.clone();
    broken[2200] = broken[2200].replace("\"payload\"", "\"paylod\"");
    let broken = broken.concat();
    for (how, again) in [
        (&["--keep-ids"][..], &["--keep-ids"][..]),
        (&["--resume", "the first"], &["--resume", "the first"]),
        (&[], &["--after", "2200"]),
    ] {
        let bench = Bench::with_orders("");
        let import = |more: &[&str], input: &str| {
            bench.run_with(
                &[&["stream", "import", "orders", "--json"], more].concat(),
                input.as_bytes(),
            )
        };
        let ran = import(how, &broken).assert_code(1);
        let error = ran.error();
        assert_eq!(
            (&error["code"], &error["line"]),
            (&json!("invalid_line"), &json!(2201)),
            "{error}"
        );
        assert_eq!((&error["stored"], &error["upto"]), (&json!(2200), &json!(2200)), "{error}");
        assert!(error["message"].as_str().unwrap().contains("unknown field `paylod`"), "{error}");
        let hint = error["hint"].as_str().unwrap();
        assert!(again.iter().all(|word| hint.contains(word)) || how == ["--keep-ids"], "{hint}");
        let done = import(again, &good).assert_ok();
        let done: Value = serde_json::from_slice(&done.stdout).unwrap();
        assert_eq!((&done["stored"], &done["skipped"]), (&json!(300), &json!(2200)));
        assert_eq!(bench.sql("SELECT count(*) || ' ' || count(DISTINCT payload::text) || ' ' || max(id) FROM sqlstreams.message_log_1"), "2500 2500 2500");
    }
}

#[test]
fn what_the_server_refuses_is_named_by_its_line_too() {
    let bench = Bench::with_orders("");
    bench.ok(&["stream", "create", "b", "--payload-type", "jsonb"]);
    let line = |id: u32, payload: &str| {
        format!("{{\"id\":{id},\"produced_at\":\"2026-03-01T12:00:00Z\",\"payload\":{payload}}}\n")
    };
    let input = line(1, "1") + "\n" + &line(2, "\"\\u0000\"");
    bench
        .run_with(&["stream", "import", "b"], input.as_bytes())
        .assert_error(1, &["line 3:", "\\u0000"]);
    let nul = line(1, "1").replace("\"payload\"", "\"key\":\"\\u0000\",\"payload\"");
    bench.run_with(&["stream", "import", "b"], nul.as_bytes()).assert_error(1, &["line 1:", "NUL"]);
    let tombstone = line(1, "null").replace("\"payload\"", "\"tombstone\":true,\"payload\"");
    bench
        .run_with(&["stream", "import", "b"], tombstone.as_bytes())
        .assert_error(1, &["line 1:", "tombstones"]);
    bench
        .run_with(&["stream", "import", "b"], (line(2, "1") + &line(1, "1")).as_bytes())
        .assert_error(1, &["line 2:", "ids ascend, and id 1 comes after 2"]);
    bench.run_with(&["stream", "import", "b", "--keep-ids"], line(7, "1").as_bytes()).assert_ok();
    bench
        .run_with(&["stream", "import", "b", "--keep-ids"], line(7, "2").as_bytes())
        .assert_error(1, &["line 1:", "another message of id 7"]);
    bench
        .run_with(&["stream", "import", "b", "--keep-ids"], line(6, "2").as_bytes())
        .assert_error(1, &["line 1:", "has come to id 7"]);
    bench
        .run_with(&["stream", "import", "nope"], line(1, "1").as_bytes())
        .assert_error(3, &["--create"]);
    assert_eq!(bench.sql("SELECT count(*) FROM sqlstreams.message_log_2"), "2");
}

#[test]
fn files_that_were_cut_off_or_changed_are_noticed() {
    let (bench, folder) = (Bench::with_orders(&"1\n".repeat(1200)), Folder::new());
    let export = bench.ok(&["stream", "export", "orders"]);
    let lines: Vec<&str> = export.split_inclusive('\n').collect();
    let cut = lines[..1101].concat();
    let ran = bench.run_with(&["stream", "import", "a", "--create", "--keep-ids"], cut.as_bytes());
    ran.assert_error(1, &["cut off", "1,100 messages are stored"]);
    let rest = bench
        .run_with(&["stream", "import", "a", "--keep-ids", "--json"], export.as_bytes())
        .assert_ok();
    assert_eq!(serde_json::from_slice::<Value>(&rest.stdout).unwrap()["stored"], 100);
    // In the middle of a line.
    let cut = &export[..export.len() / 2];
    bench
        .run_with(&["stream", "import", "b", "--create"], cut.as_bytes())
        .assert_error(1, &["line 6", "EOF"]);
    // A line less; two files in one.
    let fewer = [&lines[..500], &lines[501..]].concat().concat();
    bench
        .run_with(&["stream", "import", "c", "--create"], fewer.as_bytes())
        .assert_error(1, &["line 1201", "has 1200 messages, and 1199"]);
    let twice = export.clone() + &export;
    bench
        .run_with(&["stream", "import", "d", "--create"], twice.as_bytes())
        .assert_error(1, &["line 1203", "after the last line"]);
    let later = export.replacen("\"format\":1", "\"format\":2", 1);
    bench
        .run_with(&["stream", "import", "e", "--create"], later.as_bytes())
        .assert_error(1, &["format 2", "Upgrade"]);
    assert!(
        !bench.ok(&["stream", "list", "--json"]).contains("\"e\""),
        "made for what cannot be read"
    );
    // What it is for stores something else.
    bench.ok(&["stream", "create", "texts", "--payload-type", "text"]);
    bench
        .run_with(&["stream", "import", "texts"], export.as_bytes())
        .assert_error(2, &["stores text", "stores json"]);
    // Parquet.
    let file = folder.path("x.parquet");
    bench.ok(&["stream", "export", "orders", "--output", &file]);
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 9]).unwrap();
    bench.run(&["stream", "import", "f", &file, "--create"]).assert_error(1, &["cannot be read"]);
    bench
        .run(&["stream", "import", "f", &folder.path("none")])
        .assert_error(1, &["could not read", "No such file"]);
}

#[test]
fn a_file_appears_when_it_is_whole() {
    let (bench, folder) = (Bench::with_orders("1\n2\n"), Folder::new());
    let file = folder.path("orders.jsonl");
    bench.ok(&["stream", "export", "orders", "--output", &file]);
    let first = fs::read_to_string(&file).unwrap();
    bench
        .run(&["stream", "export", "orders", "--output", &file])
        .assert_error(1, &["exists already", "--overwrite"]);
    bench.run_with(&["produce", "orders"], b"3\n").assert_ok();

    // Somebody writes: the export waits, and may be stopped.
    let open =
        bench.start_sql("BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('4'); ");
    bench.run_with(&["produce", "orders"], b"5\n").assert_ok();
    let args = ["stream", "export", "orders", "--output", &file, "--overwrite"];
    let mut child = bench
        .command(&args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("waits for a transaction") && line.contains("message 4"), "{line}");
    assert_eq!(folder.names().len(), 2, "{:?}", folder.names());
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    said.read_to_string(&mut line).unwrap();
    assert!(line.contains("no file was written"), "{line}");
    assert_eq!(folder.names(), ["orders.jsonl"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), first);

    let child = bench.start(&args);
    eventually("it writes", || folder.names().len() == 2);
    open.end();
    assert!(child.wait_with_output().unwrap().status.success());
    assert_eq!(messages(&fs::read_to_string(&file).unwrap()).len(), 5);
    assert_eq!(folder.names(), ["orders.jsonl"]);
    let nowhere = folder.path("no/where.jsonl");
    bench
        .run(&["stream", "export", "orders", "--output", &nowhere])
        .assert_error(1, &["could not create"]);
}

#[test]
fn exports_of_a_group_go_on_where_the_last_one_ended() {
    let (bench, folder) = (Bench::with_orders("1\n2\n3\n"), Folder::new());
    let export = |file: &str| {
        bench.json(&["stream", "export", "orders", "--group", "archive", "--output", file])
    };
    let (a, b, c) = (folder.path("a.jsonl"), folder.path("b.parquet"), folder.path("c.jsonl"));
    assert_eq!(export(&a)["messages"], 3);
    bench.run_with(&["produce", "orders"], b"4\n5\n").assert_ok();
    // Nothing is written, nothing moves.
    bench
        .run(&["stream", "export", "orders", "--group", "archive", "--output", &a])
        .assert_error(1, &["exists already"]);
    bench
        .run(&["stream", "export", "orders", "--group", "archive", "--from", "1", "--output", &b])
        .assert_error(2, &["goes on where it stands"]);
    let told = export(&b);
    assert_eq!(
        (&told["messages"], &told["first_id"], &told["last_id"]),
        (&json!(2), &json!(4), &json!(5))
    );
    assert_eq!(export(&c)["messages"], 0);
    let status = bench.json(&["group", "show", "orders", "archive"]);
    assert_eq!(
        (&status["claimed"], &status["resolved"], &status["lag"]),
        (&json!(5), &json!(5), &json!(0))
    );
    for file in [&a, &b, &c] {
        bench.ok(&["stream", "import", "copy", file, "--create", "--keep-ids"]);
    }
    assert_eq!(
        bench.sql("SELECT string_agg(payload::text, '' ORDER BY id) FROM sqlstreams.message_log_2"),
        "12345"
    );
    // A group that somebody consumes.
    bench.run_with(&["produce", "orders"], b"6\n").assert_ok();
    bench.sql("SELECT sqlstreams.advance(1, (SELECT id FROM sqlstreams.consumer_group), '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 1)");
    bench
        .run(&["stream", "export", "orders", "--group", "archive"])
        .assert_error(1, &["is consumed"]);
}

#[test]
fn an_interrupted_import_says_how_to_go_on() {
    let bench = Bench::with_orders("");
    let mut child = bench
        .command(&["stream", "import", "orders", "--resume", "it"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let line = |n: u32| {
        format!("{{\"id\":{n},\"produced_at\":\"2026-03-01T12:00:00Z\",\"payload\":{n}}}\n")
    };
    stdin.write_all((1..=1000).map(line).collect::<String>().as_bytes()).unwrap();
    eventually("the first batch is stored", || {
        bench.sql("SELECT count(*) FROM sqlstreams.message_log_1") == "1000"
    });
    signal(&child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    drop(stdin);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("1,000 messages are stored") && said.contains("--resume it"), "{said}");
    let all = (1..=1200).map(line).collect::<String>();
    let ran = bench
        .run_with(&["stream", "import", "orders", "--resume", "it"], all.as_bytes())
        .assert_ok();
    assert!(
        ran.text().contains("imported 200 messages")
            && ran.text().contains("1,000 were there already"),
        "{}",
        ran.text()
    );
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let bench = Bench::with_orders(&"1\n".repeat(30_000));
    let mut child = bench.start(&["stream", "export", "orders"]);
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    drop(out);
    assert!(child.wait().unwrap().success());
}

/// A file whose bytes were changed is imported whole or refused, never in part with success.
#[test]
fn a_damaged_parquet_file_is_no_shorter_one() {
    let (bench, folder) = (Bench::with_orders(&"1\n".repeat(300)), Folder::new());
    let (whole, damaged) = (folder.path("whole.parquet"), folder.path("damaged.parquet"));
    bench.ok(&["stream", "export", "orders", "--output", &whole]);
    let bytes = fs::read(&whole).unwrap();
    let mut refused = 0;
    for round in 0..60 {
        let mut changed = bytes.clone();
        let at = (round * 7919 + 13) % changed.len();
        changed[at] ^= 0x55;
        fs::write(&damaged, &changed).unwrap();
        let name = format!("s{round}");
        let ran = bench.run(&["stream", "import", &name, &damaged, "--create", "--json"]);
        match ran.code {
            0 => {
                let told: Value = serde_json::from_slice(&ran.stdout).unwrap();
                assert_eq!(told["stored"], 300, "byte {at}: {told}");
            }
            code => {
                assert!(matches!(code, 1 | 2), "byte {at}: {code:?} {}", ran.stderr);
                refused += 1;
            }
        }
    }
    assert!(refused > 10, "only {refused} were refused");
}

#[test]
fn ids_have_to_ascend_through_the_whole_file() {
    let bench = Bench::with_orders("1\n");
    let line = |id: i64| {
        format!("{{\"id\":{id},\"produced_at\":\"2026-01-01T00:00:00Z\",\"payload\":1}}\n")
    };
    for (ids, said) in [
        (vec![0], "line 1: ids begin at 1, and this one is 0"),
        (vec![-5, 1], "line 1: ids begin at 1"),
        (vec![10, 2], "line 2: ids ascend, and id 2 comes after 10"),
        ((2001..3001).chain(1..1001).collect(), "line 1001: ids ascend, and id 1 comes after 3000"),
    ] {
        let lines: String = ids.into_iter().map(line).collect();
        let ran = bench.run_with(&["stream", "import", "orders"], lines.as_bytes());
        ran.assert_error(1, &[said]);
    }
}

#[test]
fn special_files_and_names_that_are_taken_meanwhile_are_left_alone() {
    let (bench, folder) = (Bench::with_orders("1\n2\n"), Folder::new());
    let args = ["stream", "export", "orders", "--output", "/dev/null", "--overwrite"];
    bench.run(&args).assert_error(1, &["/dev/null is no file", "redirect stdout"]);
    let name = folder.path("x.jsonl");
    bench.ok(&["stream", "export", "orders", "--output", &name]);
    bench.ok(&["stream", "export", "orders", "--output", &name, "--overwrite"]);
    assert_eq!(folder.names(), ["x.jsonl"]);
}
