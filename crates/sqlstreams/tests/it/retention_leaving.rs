//! How partitions leave the log: beside readers and producers, under timeouts, and after a crash at any point.

use std::time::{Duration, Instant};

use sqlstreams::{Client, HoldReason, Retention};

use crate::retention::{Scene, hour, scene};
use crate::support::{connect, count, eventually};

/// 3,500 messages that have been handled, in partitions that are old: three of them go.
async fn old() -> Scene {
    let scene = scene(hour()).await;
    scene.fill(3_500).await;
    scene.consume("a").await;
    scene.a_day_later().await;
    scene
}

/// Sessions that run a DETACH and wait for somebody.
const DETACHING: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' AND query LIKE 'ALTER TABLE%CONCURRENTLY' AND wait_event_type = 'Lock'";
/// Whoever runs one.
const KILL: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'ALTER TABLE%CONCURRENTLY'";
const PENDING: &str = "SELECT count(*) FROM pg_inherits WHERE inhdetachpending";

/// A partition can be made.
async fn one_more(scene: &Scene) {
    let sql = "SELECT sqlstreams.ensure_partitions(1, (SELECT max(number) + 1 FROM sqlstreams.log_partition)::int - 3)::bigint";
    eventually(async || count(&scene.db, sql).await == 1).await;
}

async fn gone(scene: &Scene) {
    eventually(async || {
        scene.stream.retain().await.unwrap();
        scene.partitions().await[0] == 3 && scene.strays().await == 0
    })
    .await;
    assert_eq!(scene.stream.info().await.unwrap().hold, None);
    let rows =
        "SELECT count(*) FROM sqlstreams.log_partition WHERE number < 3 OR state <> 'attached'";
    assert_eq!(count(&scene.db, rows).await, 0);
}

/// A backup or a report that has the log open, for minutes as far as anybody knows. Nobody waits for anybody, and disk space comes back.
#[tokio::test(flavor = "multi_thread")]
async fn tb_028_a_reader_that_scans_for_long() {
    let scene = old().await;
    let reader = connect(&scene.url).await;
    // It has opened the log and its newest partition, not those that go.
    reader
        .batch_execute("BEGIN; SELECT count(*) FROM sqlstreams.message_log_1 WHERE id > 3400")
        .await
        .unwrap();
    let done = scene.stream.retain().await.unwrap();
    assert_eq!((done.partitions, done.waiting), (0, true));
    eventually(async || count(&scene.db, DETACHING).await == 1).await;
    assert_eq!(count(&scene.db, PENDING).await, 1);
    let hold = scene.stream.info().await.unwrap().hold.unwrap();
    assert_eq!(hold.reason, HoldReason::Detach);
    let pid = count(&reader, "SELECT pg_backend_pid()::bigint").await;
    assert!(hold.detail.as_deref().unwrap().contains(&format!("process {pid}")), "{hold:?}");
    // The space of all three is there.
    for n in 0..3 {
        let bytes = format!("SELECT pg_relation_size('sqlstreams.message_log_1_p{n}')");
        eventually(async || {
            scene.stream.retain().await.unwrap();
            count(&scene.db, &bytes).await == 0
        })
        .await;
    }

    // Producers, consumers and new partitions go on meanwhile.
    let producer = scene.stream.producer();
    let mut longest = Duration::ZERO;
    for n in 0..100 {
        let started = Instant::now();
        producer.send(&n).await.unwrap();
        longest = longest.max(started.elapsed());
        if n % 25 == 0 {
            scene.stream.retain().await.unwrap();
        }
    }
    println!("the slowest send beside a DETACH that waits took {longest:?}");
    one_more(&scene).await;
    assert_eq!(scene.consume("a").await.len(), 100);
    assert_eq!(count(&scene.db, DETACHING).await, 1, "it still waits");
    let snapshot =
        count(&reader, "SELECT count(*) FROM sqlstreams.message_log_1 WHERE id > 3400").await;
    assert_eq!(snapshot, 200);
    reader.batch_execute("COMMIT").await.unwrap();
    gone(&scene).await;
}

/// A reader that has opened a partition by its own name, which the DETACH meets at its end, when it has a lock that others need.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_the_partition_itself_does_not_keep_partitions_from_being_made() {
    let scene = old().await;
    let reader = connect(&scene.url).await;
    reader.batch_execute("BEGIN; SELECT count(*) FROM sqlstreams.message_log_1_p0").await.unwrap();
    assert_eq!(scene.stream.retain().await.unwrap().partitions, 0);
    // It gives up, and leaves the rest for later.
    eventually(async || {
        count(&scene.db, DETACHING).await == 0 && count(&scene.db, PENDING).await == 1
    })
    .await;
    for _ in 0..4 {
        one_more(&scene).await;
        assert!(scene.stream.retain().await.unwrap().waiting);
    }
    reader.batch_execute("COMMIT").await.unwrap();
    gone(&scene).await;
}

/// The role's and the database's timeouts are not for a DETACH: interrupted it would stay pending.
#[tokio::test(flavor = "multi_thread")]
async fn tb_022_timeouts_of_the_database_interrupt_nothing() {
    let scene = old().await;
    let sql = "ALTER TABLE sqlstreams.exception_queue_1 SET (autovacuum_enabled = false);
        INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, attempts, due_at, dead_at)
        SELECT g.id, n, 'dead', 1, now(), now() - interval '90 days' FROM sqlstreams.consumer_group AS g, generate_series(1, 2999) AS n";
    scene.db.batch_execute(sql).await.unwrap();
    let name = count(&scene.db, "SELECT substring(current_database() FROM '\\d+')::bigint").await;
    scene.db.batch_execute(&format!("ALTER DATABASE test_{name} SET statement_timeout = '500ms'; ALTER DATABASE test_{name} SET lock_timeout = '200ms'")).await.unwrap();
    let client = Client::builder(&scene.url).maintenance(false).connect().await.unwrap();
    let stream = client.stream::<u64>("s").open().await.unwrap();
    let reader = connect(&scene.url).await;
    reader
        .batch_execute("BEGIN; SELECT count(*) FROM sqlstreams.message_log_1 WHERE id > 3400")
        .await
        .unwrap();
    eventually(async || {
        stream.retain().await.unwrap();
        count(&scene.db, DETACHING).await == 1
    })
    .await;
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert_eq!(count(&scene.db, DETACHING).await, 1, "it was interrupted");
    reader.batch_execute("COMMIT").await.unwrap();
    eventually(async || {
        stream.retain().await.unwrap();
        scene.partitions().await[0] == 3 && scene.strays().await == 0
    })
    .await;
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.message_archive_1").await, 2_999);
    // Dead letters go in chunks.
    stream.set_retention(&hour().keep_dead_for(Duration::from_secs(86_400 * 30))).await.unwrap();
    let mut dead = 0;
    eventually(async || {
        dead += stream.retain().await.unwrap().dead_letters;
        count(&scene.db, "SELECT count(*) FROM sqlstreams.message_archive_1").await == 0
    })
    .await;
    assert_eq!(dead, 2_999);
    let audited = "SELECT sum((detail ->> 'count')::bigint)::bigint FROM sqlstreams.audit WHERE action = 'expire_dead'";
    assert_eq!(count(&scene.db, audited).await, 2_999);
}

/// Interrupted while somebody has an old snapshot: finishing it has to wait for that. Nothing else does.
#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_detach_under_an_old_snapshot() {
    let scene = old().await;
    let reader = connect(&scene.url).await;
    reader
        .batch_execute("BEGIN; SELECT count(*) FROM sqlstreams.message_log_1 WHERE id > 3400")
        .await
        .unwrap();
    scene.stream.retain().await.unwrap();
    eventually(async || count(&scene.db, DETACHING).await == 1).await;
    let old = connect(&scene.url).await;
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pg_class")
        .await
        .unwrap();
    scene.db.query(KILL, &[]).await.unwrap();
    eventually(async || count(&scene.db, DETACHING).await == 0).await;
    reader.batch_execute("COMMIT").await.unwrap();
    for _ in 0..3 {
        assert!(scene.stream.retain().await.unwrap().waiting);
        assert_eq!(count(&scene.db, PENDING).await, 1);
        one_more(&scene).await;
    }
    assert_eq!(scene.holder().await.unwrap().0, HoldReason::Detach);
    let bytes = "SELECT sum(pg_relation_size(('sqlstreams.message_log_1_p' || n)::regclass))::bigint FROM generate_series(0, 2) AS n";
    assert_eq!(count(&scene.db, bytes).await, 0, "the space of all is there");
    old.batch_execute("COMMIT").await.unwrap();
    gone(&scene).await;
}

/// What an interrupted DETACH has left halfway is finished by the one function that does so, and by nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_detach_is_finished() {
    let scene = old().await;
    let reader = connect(&scene.url).await;
    reader
        .batch_execute("BEGIN; SELECT count(*) FROM sqlstreams.message_log_1 WHERE id > 3400")
        .await
        .unwrap();
    scene.stream.retain().await.unwrap();
    eventually(async || count(&scene.db, DETACHING).await == 1).await;
    scene.db.query(KILL, &[]).await.unwrap();
    eventually(async || count(&scene.db, DETACHING).await == 0).await;
    reader.batch_execute("COMMIT").await.unwrap();
    assert_eq!(count(&scene.db, PENDING).await, 1);
    // Another DETACH does not do it.
    let again = "ALTER TABLE sqlstreams.message_log_1 DETACH PARTITION sqlstreams.message_log_1_p0 CONCURRENTLY";
    scene.db.batch_execute(again).await.unwrap_err();
    let finish = "SELECT sqlstreams.finalize_detach(1, 0)::int::bigint";
    eventually(async || count(&scene.db, finish).await == 1).await;
    assert_eq!((count(&scene.db, PENDING).await, scene.strays().await), (0, 1));
    assert_eq!(count(&scene.db, finish).await, 1, "there is nothing left to do");
    gone(&scene).await;
}

/// Out of the log before what is referred to was copied, by somebody's hand: it is neither emptied nor dropped until it was.
#[tokio::test]
async fn a_leaf_that_is_out_too_early_is_copied_first() {
    let scene = old().await;
    let sql = "INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, attempts, due_at, dead_at) SELECT id, 500, 'dead', 1, now(), now() FROM sqlstreams.consumer_group";
    scene.db.batch_execute(sql).await.unwrap();
    let out = "SELECT sqlstreams.retire_partitions(1, 1); ALTER TABLE sqlstreams.message_log_1 DETACH PARTITION sqlstreams.message_log_1_p0";
    scene.db.batch_execute(out).await.unwrap();
    for function in ["empty_leaf", "drop_leaf"] {
        let sql = format!("SELECT sqlstreams.{function}(1, 0)::int::bigint");
        assert_eq!(count(&scene.db, &sql).await, 0, "{function}");
    }
    let left = "SELECT count(*) FROM sqlstreams.message_log_1_p0";
    assert_eq!(count(&scene.db, left).await, 999);
    gone(&scene).await;
    let archived = "SELECT count(*) FROM sqlstreams.message_archive_1 WHERE id = 500 AND payload::text = '500'";
    assert_eq!(count(&scene.db, archived).await, 1);
}

/// Kills every session of the crate's.
async fn kill_maintenance(scene: &Scene) {
    let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'sqlstreams'";
    scene.db.query(sql, &[]).await.unwrap();
}

/// Whoever does it is lost after each of the statements of which it consists, and another goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_any_two_steps() {
    const STEPS: [&str; 7] = [
        "SELECT sqlstreams.retire_partitions(1, 1)",
        "SELECT sqlstreams.skip_to_first(1)",
        "SELECT sqlstreams.archive_referenced(1, 0, 2)",
        "DO $$ BEGIN LOOP EXIT WHEN (SELECT finished FROM sqlstreams.archive_referenced(1, 0, 2)); END LOOP; END $$",
        "ALTER TABLE sqlstreams.message_log_1 DETACH PARTITION sqlstreams.message_log_1_p0 CONCURRENTLY",
        "SELECT sqlstreams.finalize_detach(1, 0)",
        "SELECT sqlstreams.drop_leaf(1, 0)",
    ];
    for crash in 0..=STEPS.len() {
        let scene = old().await;
        let sql = "INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, attempts, due_at, dead_at)
            SELECT g.id, n * 100, 'dead', 1, now(), now() FROM sqlstreams.consumer_group AS g, generate_series(1, 9) AS n";
        scene.db.batch_execute(sql).await.unwrap();
        let maintainer = connect(&scene.url).await;
        for (n, step) in STEPS[..crash].iter().enumerate() {
            if n == 4 && crash == 5 {
                // Halfway: a reader keeps it from ending, and its backend is killed.
                let reader = connect(&scene.url).await;
                reader
                    .batch_execute("BEGIN; SELECT count(*) FROM sqlstreams.message_log_1")
                    .await
                    .unwrap();
                let killed = tokio::spawn(async move { maintainer.batch_execute(step).await });
                eventually(async || count(&scene.db, DETACHING).await == 1).await;
                scene.db.query(KILL, &[]).await.unwrap();
                killed.await.unwrap().unwrap_err();
                reader.batch_execute("COMMIT").await.unwrap();
                break;
            }
            maintainer.batch_execute(step).await.unwrap();
        }
        gone(&scene).await;
        let archive = "SELECT string_agg(id || '=' || payload::text, ' ' ORDER BY id) FROM sqlstreams.message_archive_1";
        let archive: String = scene.db.query_one(archive, &[]).await.unwrap().get(0);
        let expected: Vec<String> = (1..10).map(|n| format!("{0}={0}", n * 100)).collect();
        assert_eq!(archive, expected.join(" "), "after {crash} steps");
        scene.stream.group("a").open().await.unwrap().redrive(None, 100).await.unwrap();
        assert_eq!(scene.consume("a").await.len(), 9);
    }
}

/// Whoever does it is killed again and again, its backends too.
#[tokio::test(flavor = "multi_thread")]
async fn killed_again_and_again() {
    let scene = scene(hour()).await;
    scene.fill(12_500).await;
    scene.consume("a").await;
    let sql = "INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, attempts, due_at, dead_at)
        SELECT g.id, n, 'dead', 1, now(), now() FROM sqlstreams.consumer_group AS g, generate_series(1, 12000, 3) AS n";
    scene.db.batch_execute(sql).await.unwrap();
    scene.a_day_later().await;
    let mut kills = 0;
    while scene.partitions().await[0] < 12 || scene.strays().await > 0 {
        let client = Client::builder(&scene.url).maintenance(false).connect().await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let running = tokio::spawn(async move { stream.retain().await });
        tokio::time::sleep(Duration::from_millis(fastrand::u64(5..150))).await;
        if fastrand::bool() {
            kill_maintenance(&scene).await;
        }
        running.abort();
        drop(client);
        kills += 1;
        assert!(kills < 2_000, "it does not come to an end");
    }
    println!("{kills} kills");
    let lost = "SELECT count(*) FROM generate_series(1, 12000, 3) AS n WHERE NOT EXISTS (SELECT FROM sqlstreams.message_archive_1 WHERE id = n AND payload::text = n::text)
        AND n < 12000";
    assert_eq!(count(&scene.db, lost).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn several_at_once_do_no_harm() {
    let scene = scene(hour()).await;
    scene.fill(9_500).await;
    scene.consume("a").await;
    scene.a_day_later().await;
    let mut all = Vec::new();
    for _ in 0..5 {
        let client = Client::builder(&scene.url).maintenance(false).connect().await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        all.push(tokio::spawn(async move {
            for _ in 0..4 {
                // One may be in another's way.
                let _ = stream.retain().await;
            }
        }));
    }
    for one in all {
        one.await.unwrap();
    }
    eventually(async || {
        scene.stream.retain().await.unwrap();
        scene.partitions().await[0] == 9 && scene.strays().await == 0
    })
    .await;
}

/// In whatever state they are: tables of a stream that is dropped do not stay behind.
#[tokio::test(flavor = "multi_thread")]
async fn tb_030_a_stream_that_is_dropped_leaves_nothing() {
    for detached in [false, true] {
        let scene = old().await;
        let reader = connect(&scene.url).await;
        let what = if detached { "_p0" } else { "" };
        reader
            .batch_execute(&format!(
                "BEGIN; SELECT count(*) FROM sqlstreams.message_log_1{what} WHERE id > 3400"
            ))
            .await
            .unwrap();
        scene.stream.retain().await.unwrap();
        eventually(async || count(&scene.db, PENDING).await == 1).await;
        reader.batch_execute("COMMIT").await.unwrap();
        eventually(async || count(&scene.db, DETACHING).await == 0).await;
        scene.stream.clone().drop_stream().await.unwrap();
        let left = "SELECT count(*) FROM pg_class WHERE relname ~ '_1(_p\\d+)?$' AND relnamespace = 'sqlstreams'::regnamespace";
        assert_eq!(count(&scene.db, left).await, 0);
        let rows = "SELECT (SELECT count(*) FROM sqlstreams.log_partition) + (SELECT count(*) FROM sqlstreams.retention_hold)";
        assert_eq!(count(&scene.db, rows).await, 0);
    }
}

/// A role that consumes but does not own the tables changes nothing, and says so.
#[tokio::test]
async fn only_the_owner_of_the_tables_can() {
    let scene = old().await;
    let password = scene.url.split(['@', ':']).nth(2).unwrap();
    let role = format!(
        "CREATE ROLE keeper LOGIN PASSWORD '{password}'; GRANT USAGE ON SCHEMA sqlstreams TO keeper;
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA sqlstreams TO keeper; GRANT ALL ON ALL SEQUENCES IN SCHEMA sqlstreams TO keeper"
    );
    scene.db.batch_execute(&role).await.unwrap();
    let keeper = Client::builder(&scene.url.replace("//postgres:", "//keeper:")).migrate(false);
    let stream =
        keeper.maintenance(false).connect().await.unwrap().stream::<u64>("s").open().await.unwrap();
    let done = stream.retain().await.unwrap();
    assert_eq!((done.partitions, done.waiting), (0, true));
    let hold = stream.info().await.unwrap().hold.unwrap();
    assert_eq!(hold.reason, HoldReason::Privilege);
    assert!(hold.detail.unwrap().contains("keeper"));
    assert_eq!(scene.first_id().await, 1);
    gone(&scene).await;
}

/// Streams that keep everything that they have: one statement for all of them, that finds nothing.
#[tokio::test]
async fn a_thousand_streams_cost_one_statement() {
    let scene = scene(Retention::forever()).await;
    let sql = "INSERT INTO sqlstreams.stream (name, payload_type, partition_size, retain_for, retain_bytes, retain_count, retain_dead_for)
            SELECT 'n' || n, 'json', 1000, '7 days', 1000000, 100000, '30 days' FROM generate_series(1, 1000) AS n;
        INSERT INTO sqlstreams.log_partition (stream_id, number, from_id, to_id, sealed_at, bytes)
            SELECT s.id, n, n * 1000, n * 1000 + 999, CASE WHEN n < 10 THEN now() - interval '1 hour' END, 50000 FROM sqlstreams.stream AS s, generate_series(0, 13) AS n WHERE s.id > 1;
        INSERT INTO sqlstreams.maintenance_step (step, stream_id, started_at, duration, next_due) SELECT 'archive', id, now(), '0', now() + interval '1 hour' FROM sqlstreams.stream;
        ANALYZE";
    scene.db.batch_execute(sql).await.unwrap();
    let due = |step: &str| {
        format!(
            "SELECT count(*) FROM sqlstreams.{step}_due(ARRAY(SELECT (id, 10500, 1000)::sqlstreams.stream_head FROM sqlstreams.stream))"
        )
    };
    assert_eq!(count(&scene.db, &due("retention")).await, 0);
    assert_eq!(count(&scene.db, &due("archive")).await, 0);
    // And one that has something to do is found among them.
    scene.db.batch_execute("UPDATE sqlstreams.log_partition SET sealed_at = sealed_at - interval '7 days' WHERE stream_id = 500").await.unwrap();
    assert_eq!(count(&scene.db, &due("retention")).await, 1);
}

/// As docs/retention.md has it: what leaves is gone for older snapshots, too, but for those that have opened the log.
#[tokio::test(flavor = "multi_thread")]
async fn an_older_snapshot_sees_everything_if_it_has_the_log_open() {
    for open in [false, true] {
        let scene = old().await;
        let reader = connect(&scene.url).await;
        reader.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await.unwrap();
        if open {
            let lock = "LOCK TABLE sqlstreams.message_log_1 IN ACCESS SHARE MODE";
            reader.batch_execute(lock).await.unwrap();
        }
        let first = "SELECT first_id FROM sqlstreams.stream";
        assert_eq!(count(&reader, first).await, 1);
        if open {
            for _ in 0..3 {
                let done = scene.stream.retain().await.unwrap();
                assert_eq!((done.partitions, done.waiting), (0, true));
            }
        } else {
            gone(&scene).await;
        }
        let all = "SELECT count(*) FROM sqlstreams.message_log_1";
        assert_eq!(count(&reader, all).await, if open { 3_500 } else { 501 });
        assert_eq!(count(&reader, first).await, 1);
        reader.batch_execute("COMMIT").await.unwrap();
        gone(&scene).await;
    }
}
