//! What the doctor finds, and what it does about it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sqlstreams::{Client, Delivery, Doctor, ErrorKind, Finding, RetryPolicy, Severity};
use sqlstreams_dev::{Cluster, StopMode};
use tokio_postgres::Client as Db;

use crate::buffers::{buffers, middle};
use crate::support::{client, client_at, connect, count, database, numbers};

pub async fn codes(doctor: &Doctor) -> Vec<String> {
    doctor.look().await.unwrap().into_iter().map(|finding| finding.code).collect()
}

/// The one thing that is found.
pub async fn finding(doctor: &Doctor) -> Finding {
    let mut findings = doctor.look().await.unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
    findings.pop().unwrap()
}

/// Breaks something, finds it and nothing else, repairs it, and finds nothing any more. Returns what was found.
async fn heals(client: &Client, db: &Db, breaks: &str, code: &str) -> Finding {
    let doctor = client.doctor();
    assert_eq!(codes(&doctor).await, [""; 0], "before {code}");
    db.batch_execute(breaks).await.unwrap();
    let found = finding(&doctor).await;
    assert_eq!(found.code, code, "{found:?}");
    assert!(found.fixable && !found.hint.is_empty(), "{found:?}");
    let audited = format!(
        "SELECT count(*) FROM sqlstreams.audit WHERE action = 'doctor_{code}' AND stream_name = 's'"
    );
    let before = count(db, &audited).await;
    doctor.repair(&found).await.unwrap();
    assert_eq!(count(db, &audited).await, before + 1);
    assert_eq!(codes(&doctor).await, [""; 0], "after {code}");
    // Once more does no harm.
    doctor.repair(&found).await.unwrap();
    assert_eq!(codes(&doctor).await, [""; 0]);
    found
}

#[tokio::test]
async fn what_is_well_is_not_found() {
    let (client, db) = client().await;
    assert_eq!(codes(&client.doctor()).await, [""; 0]);
    let stream = numbers(&client, "s", 500).await;
    let once = RetryPolicy::attempts(1);
    for mode in [sqlstreams::Mode::Parallel, sqlstreams::Mode::Ordered, sqlstreams::Mode::Fair] {
        let group = stream.group(mode.as_str()).mode(mode).retry(once).create().await.unwrap();
        let consumer = group.consumer().until_caught_up();
        consumer
            .run(
                async |m: Delivery<u64>| {
                    if m.payload.is_multiple_of(9) { Err("no") } else { Ok(()) }
                },
            )
            .await
            .unwrap();
    }
    let producer = stream.producer();
    producer.send(&1).delay(Duration::from_secs(600)).await.unwrap();
    producer.send(&1).idempotency_key("k").await.unwrap();
    client.stream::<Option<u64>>("c").compacted(true).create().await.unwrap();
    assert_eq!(codes(&client.doctor()).await, [""; 0]);
    let error = client.doctor().look_at(Some("x")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownStream);
    // Looking has written nothing.
    assert_eq!(
        count(&db, "SELECT count(*) FROM sqlstreams.audit WHERE action LIKE 'doctor%'").await,
        0
    );
}

#[tokio::test]
async fn sequences_behind_their_tables_are_moved() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 100).await;
    stream.producer().send(&1).delay(Duration::from_secs(3600)).await.unwrap();
    let found = heals(
        &client,
        &db,
        "SELECT setval('sqlstreams.message_log_1_id_seq', 40)",
        "sequence_behind",
    )
    .await;
    assert_eq!(
        (found.severity, &found.detail),
        (Severity::Error, &json!({"sequence": 40, "log": 100}))
    );
    assert_eq!(stream.producer().send(&1).await.unwrap().id, 101);
    let unused = "ALTER SEQUENCE sqlstreams.message_log_1_id_seq RESTART";
    heals(&client, &db, unused, "sequence_behind").await;
    assert_eq!(stream.producer().send(&1).await.unwrap().id, 102);
    let unused = "ALTER SEQUENCE sqlstreams.message_delayed_1_id_seq RESTART";
    heals(&client, &db, unused, "delayed_sequence_behind").await;
    let sent = stream.producer().send(&1).delay(Duration::from_secs(3600)).await.unwrap();
    assert_eq!(sent.id, 2);

    db.batch_execute("ALTER SEQUENCE sqlstreams.stream_id_seq RESTART").await.unwrap();
    let found = finding(&client.doctor()).await;
    assert_eq!((found.code.as_str(), found.stream.as_deref()), ("catalog_sequence_behind", None));
    assert!(client.stream::<u64>("t").create().await.is_err());
    // Two attempts to create draw ids; the sequence has caught up by itself or is repaired.
    db.batch_execute("ALTER SEQUENCE sqlstreams.stream_id_seq RESTART").await.unwrap();
    client.doctor().repair(&found).await.unwrap();
    assert_eq!(client.stream::<u64>("t").create().await.unwrap().id(), 2);
}

/// The log is as it was at 60, whatever `knows` has come further.
async fn ahead(knows: &str, of: &str, value: i64) {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 60).await;
    let group = stream.group("g").create().await.unwrap();
    let handler = async |_: Delivery<u64>| Ok::<_, String>(());
    group.consumer().until_caught_up().run(handler).await.unwrap();
    let found = heals(&client, &db, knows, "ahead_of_log").await;
    assert_eq!(found.severity, Severity::Error);
    assert_eq!(found.detail[of], json!(value), "{found:?}");
    assert!(
        found.message.contains("60") && found.message.contains(&value.to_string()),
        "{found:?}"
    );
    assert!(found.hint.contains("nobody would receive them"), "{found:?}");
    assert_eq!(stream.producer().send(&7).await.unwrap().id, value + 1, "{of}");
}

#[tokio::test]
async fn tb_150_ids_that_anything_knows_are_not_used_again() {
    let group = "(SELECT id FROM sqlstreams.consumer_group)";
    ahead("UPDATE sqlstreams.consumer_group_cursor_1 SET claimed = 100", "cursors", 100).await;
    ahead("UPDATE sqlstreams.consumer_group_cursor_1 SET cohorts = ARRAY[(1, 60)::sqlstreams.lane_cohort, (-2, 99)::sqlstreams.lane_cohort]", "cursors", 99).await;
    ahead(&format!("INSERT INTO sqlstreams.consumer_lease_1 (group_id, seq, token, pending, expires_at) VALUES ({group}, 900, gen_random_uuid(), '{{[50,88]}}', now())"), "leases", 88).await;
    ahead(&format!("INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, due_at, dead_at) VALUES ({group}, 77, 'dead', now(), now())"), "exceptions", 77).await;
    // Of a group that there is no more.
    ahead("INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, due_at) VALUES (4711, 78, 'ready', now())", "exceptions", 78).await;
    ahead(&format!("INSERT INTO sqlstreams.consumer_done_1 VALUES ({group}, 79)"), "settled", 79)
        .await;
    ahead("INSERT INTO sqlstreams.message_idempotency_1 VALUES (1, 2, 80, 0, now()), (1, 3, -900, 0, now())", "idempotency_keys", 80).await;
    ahead("UPDATE sqlstreams.stream_fence SET settled = 81", "fence", 81).await;
    ahead("UPDATE sqlstreams.stream_fence SET head = 82, writers = '{9/9}'", "fence", 82).await;
    ahead(&format!("INSERT INTO sqlstreams.binding_set (group_id, version, after_id, bindings) VALUES ({group}, 1, 83, '[]'); UPDATE sqlstreams.consumer_group SET binding_version = 1"), "bindings", 83).await;
}

/// What is lost without the doctor.
#[tokio::test]
async fn tb_150_a_log_restored_to_an_earlier_point_loses_nothing_new() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 100).await;
    let group = stream.group("g").create().await.unwrap();
    let handle = async || {
        let mut seen = Vec::new();
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let handler = move |m: Delivery<u64>| {
            let _ = tell.send(m.payload);
            std::future::ready(Ok::<_, String>(()))
        };
        group.consumer().until_caught_up().run(handler).await.unwrap();
        while let Ok(payload) = told.try_recv() {
            seen.push(payload);
        }
        seen
    };
    assert_eq!(handle().await.len(), 100);
    db.batch_execute("DELETE FROM sqlstreams.message_log_1 WHERE id > 60; SELECT setval('sqlstreams.message_log_1_id_seq', 60)").await.unwrap();
    let found = finding(&client.doctor()).await;
    assert_eq!(found.code, "ahead_of_log");
    stream.producer().send(&1_000).await.unwrap();
    assert_eq!(handle().await, [0_u64; 0], "the group takes it for done: this is what is found");
    client.doctor().repair(&found).await.unwrap();
    stream.producer().send(&1_001).await.unwrap();
    assert_eq!(handle().await, [1_001]);
}

#[tokio::test]
async fn tb_150_another_place_is_another_epoch() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 60).await;
    for (was, said) in [
        ("system = system + 1", "another cluster"),
        ("database = database + 1", "another database"),
        ("schema = schema + 1", "another database"),
        ("timeline = timeline + 1", "timeline"),
    ] {
        db.batch_execute(&format!("UPDATE sqlstreams.installation SET {was}")).await.unwrap();
        let head = stream.info().await.unwrap().head;
        let found = finding(&client.doctor()).await;
        assert_eq!((found.code.as_str(), found.severity), ("restored", Severity::Warning));
        assert!(found.message.contains(said), "{found:?}");
        client.doctor().repair(&found).await.unwrap();
        assert_eq!(codes(&client.doctor()).await, [""; 0]);
        assert_eq!(stream.producer().send(&1).await.unwrap().id, head + 1_000_001);
    }
    // Whoever installed it was not allowed to know, which says nothing.
    db.batch_execute("UPDATE sqlstreams.installation SET system = 0, timeline = 0").await.unwrap();
    assert_eq!(codes(&client.doctor()).await, [""; 0]);
    db.batch_execute("DELETE FROM sqlstreams.installation").await.unwrap();
    let found = finding(&client.doctor()).await;
    assert!(found.message.contains("not known"), "{found:?}");
    // What was left out is passed over.
    let handler = async |_: Delivery<u64>| Ok::<_, String>(());
    let consumed = stream.group("g").consumer().until_caught_up().run(handler).await.unwrap();
    assert_eq!(consumed.handled, 64);
}

#[tokio::test]
async fn parts_that_are_missing_are_made() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").partition_size(1000).create().await.unwrap();
    stream.producer().send(&1).await.unwrap();
    let seq = "ALTER SEQUENCE sqlstreams.message_log_1_id_seq CACHE 20";
    heals(&client, &db, seq, "sequence_cache").await;
    let write = "INSERT INTO sqlstreams.message_log_1_p0 (id, payload) OVERRIDING SYSTEM VALUE VALUES (500, '1')";
    for breaks in [
        "DROP TRIGGER refuse_direct_write ON sqlstreams.message_log_1_p0",
        "ALTER TABLE sqlstreams.message_log_1_p0 DISABLE TRIGGER refuse_direct_write",
        "ALTER TABLE sqlstreams.message_log_1_p0 ENABLE TRIGGER refuse_direct_write; DROP TRIGGER refuse_direct_write ON sqlstreams.message_log_1_p1",
    ] {
        let found = heals(&client, &db, breaks, "guard_missing").await;
        assert_eq!(found.detail["partitions"][0], "message_log_1_p0");
        for role in ["origin", "replica"] {
            db.batch_execute(&format!("SET session_replication_role = {role}")).await.unwrap();
            let error = db.batch_execute(write).await.unwrap_err();
            assert_eq!(error.code().unwrap().code(), "SQ007");
        }
        db.batch_execute("RESET session_replication_role").await.unwrap();
    }
    heals(&client, &db, "DELETE FROM sqlstreams.stream_fence", "fence_missing").await;
    heals(
        &client,
        &db,
        "DROP FUNCTION sqlstreams.settle_message_1, sqlstreams.produce_1",
        "functions_missing",
    )
    .await;
    stream.producer().send(&1).idempotency_key("k").await.unwrap();
    let found =
        heals(&client, &db, "DROP TABLE sqlstreams.message_log_1_p1", "partitions_missing").await;
    assert_eq!((found.severity, &found.detail["partitions"]), (Severity::Warning, &json!(["1"])));
    let moved = "SELECT setval('sqlstreams.message_log_1_id_seq', 77777)";
    let found = heals(&client, &db, moved, "partitions_missing").await;
    assert_eq!(found.severity, Severity::Error);
    stream.producer().send(&1).await.unwrap();

    // A table in its way is somebody's.
    db.batch_execute(
        "DROP TABLE sqlstreams.message_log_1_p78; DELETE FROM sqlstreams.log_partition WHERE number = 78; CREATE TABLE sqlstreams.message_log_1_p78 (mine text)",
    )
    .await
    .unwrap();
    let found = finding(&client.doctor()).await;
    assert!(!found.fixable && found.hint.contains("attach"), "{found:?}");
    let error = client.doctor().repair(&found).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

/// A compacted stream's partitions are deleted from, and stay so.
#[tokio::test]
async fn a_guard_that_is_restored_lets_compaction_delete() {
    let (client, db) = client().await;
    let stream = client.stream::<Option<u64>>("s").compacted(true).create().await.unwrap();
    for _ in 0..3 {
        stream.producer().send(&Some(1)).key("a").await.unwrap();
    }
    let breaks = "DROP TRIGGER refuse_direct_write ON sqlstreams.message_log_1_p0";
    heals(&client, &db, breaks, "guard_missing").await;
    assert_eq!(stream.compact(Duration::ZERO, Duration::ZERO).await.unwrap().removed, 2);
}

#[tokio::test]
async fn streams_without_tables_get_them() {
    let (client, db) = client().await;
    db.batch_execute("INSERT INTO sqlstreams.stream (name, payload_type, partition_size, compacted, notify) VALUES ('s', 'text', 5000, true, true)").await.unwrap();
    let doctor = client.doctor();
    // One thing after the other.
    for code in ["tables_missing", "fence_missing", "partitions_missing"] {
        let found = doctor.look().await.unwrap();
        let found = found
            .iter()
            .find(|found| found.code == code)
            .unwrap_or_else(|| panic!("{code}: {found:?}"));
        doctor.repair(found).await.unwrap();
    }
    assert_eq!(codes(&doctor).await, [""; 0]);
    let stream = client
        .stream::<String>("s")
        .codec::<sqlstreams::Text>()
        .compacted(true)
        .open()
        .await
        .unwrap();
    stream.producer().send(&"x".to_owned()).key("k").await.unwrap();
    assert_eq!(stream.latest("k").await.unwrap().unwrap().payload, "x");
    assert_eq!(count(&db, "SELECT count(*) FROM pg_trigger WHERE tgname = 'ring' AND tgrelid = 'sqlstreams.message_log_1'::regclass").await, 1);
    // Some of them only: what is missing is lost.
    db.batch_execute("DROP TABLE sqlstreams.consumer_done_1").await.unwrap();
    let found = finding(&doctor).await;
    assert!(found.code == "tables_missing" && !found.fixable, "{found:?}");
}

#[tokio::test]
async fn what_cannot_be_repaired_is_told() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 5).await;
    stream.group("g").ordered().create().await.unwrap();
    let doctor = client.doctor();
    for (breaks, code, severity, mends) in [
        (
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'sqlstreams.exception_dead_1'::regclass",
            "index_invalid",
            Severity::Warning,
            "UPDATE pg_index SET indisvalid = true WHERE indexrelid = 'sqlstreams.exception_dead_1'::regclass",
        ),
        (
            "UPDATE sqlstreams.consumer_group SET lane_probe = lane_probe + 1",
            "lanes_moved",
            Severity::Info,
            "UPDATE sqlstreams.consumer_group SET lane_probe = lane_probe - 1",
        ),
        (
            "CREATE TABLE kept AS TABLE sqlstreams.consumer_group_cursor_1; DELETE FROM sqlstreams.consumer_group_cursor_1",
            "cursor_missing",
            Severity::Error,
            "INSERT INTO sqlstreams.consumer_group_cursor_1 SELECT * FROM kept",
        ),
    ] {
        db.batch_execute(breaks).await.unwrap();
        let found = finding(&doctor).await;
        assert_eq!(
            (found.code.as_str(), found.severity, found.fixable),
            (code, severity, false),
            "{found:?}"
        );
        db.batch_execute(mends).await.unwrap();
        assert_eq!(codes(&doctor).await, [""; 0]);
    }
}

#[tokio::test]
async fn who_holds_the_log_up_is_named() {
    let cluster =
        tokio::task::spawn_blocking(|| Arc::new(Cluster::builder().durable(true).start().unwrap()));
    let cluster = cluster.await.unwrap();
    let url = cluster.url("postgres");
    let (client, mut db) = client_at(&url).await;
    numbers(&client, "s", 5).await;
    let mut open = connect(&url).await;
    let write = "BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('1')";
    open.batch_execute(&format!("{write}; PREPARE TRANSACTION 'order 42'")).await.unwrap();
    let found = async |db: &Db| {
        let look = "SELECT code, message, detail::text FROM sqlstreams.doctor(p_open => '0', p_old => '0') WHERE severity = 'warning' ORDER BY 1, 2";
        let rows = db.query(look, &[]).await.unwrap();
        rows.iter()
            .map(|row| {
                format!(
                    "{} {} {}",
                    row.get::<_, &str>(0),
                    row.get::<_, &str>(1),
                    row.get::<_, &str>(2)
                )
            })
            .collect::<Vec<_>>()
    };
    // Prepared, and prepared by a server that has been restarted since.
    for restart in [false, true] {
        if restart {
            let cluster = cluster.clone();
            let again = move || {
                cluster.stop(StopMode::Immediate).unwrap();
                cluster.start_again().unwrap();
            };
            tokio::task::spawn_blocking(again).await.unwrap();
            (db, open) = (connect(&url).await, connect(&url).await);
        }
        let told = found(&db).await;
        let of =
            |code: &str| told.iter().filter(|t| t.starts_with(code)).cloned().collect::<Vec<_>>();
        assert_eq!(of("fence_held").len(), 1, "{told:?}");
        assert!(
            of("fence_held")[0].contains("'order 42'")
                && of("fence_held")[0].contains("\"gid\": \"order 42\""),
            "{told:?}"
        );
        assert!(of("old_snapshot").iter().any(|t| t.contains("order 42")), "{told:?}");
    }
    open.batch_execute("ROLLBACK PREPARED 'order 42'").await.unwrap();
    open.batch_execute(write).await.unwrap();
    let told = found(&db).await;
    let pid = count(&open, "SELECT pg_backend_pid()::bigint").await;
    assert!(
        told.iter().any(|t| t.starts_with("fence_held")
            && t.contains(&format!("\"pid\": {pid}"))
            && t.contains("INSERT INTO")),
        "{told:?}"
    );
    open.batch_execute("COMMIT").await.unwrap();
    assert!(!found(&db).await.iter().any(|t| t.starts_with("fence_held")));
    tokio::task::spawn_blocking(move || drop(cluster)).await.unwrap();
}

#[tokio::test]
async fn a_schema_that_is_missing_or_another_is_a_finding() {
    let url = database().await;
    let doctor = Client::builder(&url).doctor().await.unwrap();
    let found = finding(&doctor).await;
    assert_eq!((found.code.as_str(), found.fixable), ("schema_missing", true));
    doctor.repair(&found).await.unwrap();
    assert_eq!(codes(&doctor).await, [""; 0]);
    let db = connect(&url).await;
    db.batch_execute("UPDATE sqlstreams.schema_migration SET functions = 'other'").await.unwrap();
    let found = finding(&doctor).await;
    assert_eq!((found.code.as_str(), found.fixable), ("schema_version", true));
    doctor.repair(&found).await.unwrap();
    assert_eq!(codes(&doctor).await, [""; 0]);
    db.batch_execute("INSERT INTO sqlstreams.schema_migration (version, oldest, name, checksum, functions) VALUES (999, 999, 'x', 'x', 'x')").await.unwrap();
    let found = finding(&doctor).await;
    assert_eq!((found.code.as_str(), found.fixable), ("schema_version", false));
    assert!(found.message.contains("999") && found.hint.contains("Upgrade"), "{found:?}");
}

/// Looking takes about the same whatever the tables hold.
#[tokio::test]
async fn looking_is_bounded() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    let fill = async |rows: i64| {
        let g = group.id();
        db.batch_execute(&format!(
            "INSERT INTO sqlstreams.message_log_1 (payload) SELECT '1' FROM generate_series(1, {rows});
             INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, due_at) SELECT {g}, x, 'ready', now() FROM generate_series(1, {rows}) AS x ON CONFLICT DO NOTHING;
             INSERT INTO sqlstreams.consumer_done_1 SELECT {g}, x FROM generate_series(1, {rows}) AS x ON CONFLICT DO NOTHING;
             INSERT INTO sqlstreams.message_idempotency_1 SELECT x, {rows}, 1, 1, now() FROM generate_series(1, {rows}) AS x"
        )).await.unwrap();
        db.batch_execute("VACUUM ANALYZE").await.unwrap();
    };
    let pages = async || {
        let mut samples = Vec::new();
        for _ in 0..5 {
            samples.push(buffers(&db, "SELECT * FROM sqlstreams.doctor()").await);
        }
        middle(samples)
    };
    fill(1_500).await;
    let few = pages().await;
    fill(60_000).await;
    let many = pages().await;
    assert!(many < few + 150.0, "{few} pages with 1,500 rows in each table, {many} with 61,500");
}

/// What the doctor names does not make anybody wait for ever or stop without a word.
#[tokio::test]
async fn a_group_without_its_cursor_is_refused_by_name() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    stream.producer().send(&1).await.unwrap();
    db.batch_execute("DELETE FROM sqlstreams.consumer_group_cursor_1").await.unwrap();
    let consumed = group.consumer().until_caught_up().run(async |_: sqlstreams::Delivery<u64>| {});
    let error = consumed.await.unwrap_err();
    assert!(error.to_string().contains("group g has no cursor"), "{error:?}");
    assert!(error.hint().unwrap().contains("doctor"), "{error:?}");
    for error in [
        group.pause().await.unwrap_err(),
        group.seek(sqlstreams::Start::Latest).run().await.unwrap_err(),
        group.seek(sqlstreams::Start::Latest).preview().await.unwrap_err(),
    ] {
        assert!(error.to_string().contains("has no cursor"), "{error:?}");
    }
}

/// The partition that is written to is gone, and its row is not.
#[tokio::test]
async fn a_partition_that_was_dropped_is_made_anew() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").partition_size(1000).create().await.unwrap();
    // In SQL: a producer of the crate would make it by itself.
    db.batch_execute("INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('1')").await.unwrap();
    db.batch_execute("DROP TABLE sqlstreams.message_log_1_p0").await.unwrap();
    let doctor = client.doctor();
    let found = finding(&doctor).await;
    assert_eq!(found.code, "partitions_missing");
    doctor.repair(&found).await.unwrap();
    assert_eq!(codes(&doctor).await, [""; 0]);
    stream.producer().send(&2).await.unwrap();
}

/// Ids that a repair leaves out are no messages: retention by count keeps what it kept, and no partitions are made for them.
#[tokio::test]
async fn ids_that_are_left_out_count_for_nothing() {
    let (client, db) = client().await;
    let keep = sqlstreams::Retention::forever().keep_count(5_000).drop_unread(true);
    let stream =
        client.stream::<u64>("s").partition_size(1000).retention(keep).create().await.unwrap();
    for _ in 0..9 {
        let fill = "INSERT INTO sqlstreams.message_log_1 (payload) SELECT to_json(n) FROM generate_series(1, 500) AS n";
        db.batch_execute(fill).await.unwrap();
        db.batch_execute("SELECT sqlstreams.ensure_partitions(1)").await.unwrap();
    }
    db.batch_execute("DELETE FROM sqlstreams.installation").await.unwrap();
    let doctor = client.doctor();
    let found = finding(&doctor).await;
    assert_eq!(found.code, "restored");
    doctor.repair(&found).await.unwrap();
    assert!(stream.info().await.unwrap().head > 1_000_000);
    for _ in 0..3 {
        client.maintenance().once().await.unwrap();
        db.batch_execute(
            "UPDATE sqlstreams.log_partition SET sealed_at = sealed_at - interval '1 hour'",
        )
        .await
        .unwrap();
        db.batch_execute("UPDATE sqlstreams.maintenance_step SET next_due = NULL").await.unwrap();
    }
    stream.retain().await.unwrap();
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 4_500);
    let ahead = "SELECT count(*) FROM sqlstreams.log_partition WHERE from_id > 1000000";
    assert!(count(&db, ahead).await < 20);
}
