//! A pinned horizon: while anybody holds an old snapshot, dead rows pile up, and no call may come to read more of them.
//!
//! Counted in buffers, which do not depend on the machine. `SQLSTREAMS_HORIZON_CALLS` sets how many calls are made in
//! between (4,000); scripts/long-tests makes 100,000.

use std::env;
use std::time::Duration;

use tokio_postgres::Client as Db;

use crate::buffers::{average, buffers, middle};
use crate::plain::{Plain, installed};
use crate::support::{connect, count, database};

/// Longer than a rotation, so that every state of a generation is among them.
const SAMPLES: usize = 210;

fn calls() -> i64 {
    env::var("SQLSTREAMS_HORIZON_CALLS").map_or(4_000, |n| n.parse().unwrap())
}

/// A snapshot that is held until it is dropped, and the tables as a vacuum leaves them.
async fn pinned(url: &str, db: &Db) -> Db {
    let holder = connect(url).await;
    holder
        .batch_execute(
            "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM sqlstreams.stream",
        )
        .await
        .unwrap();
    // The planner knows them as tiny now, and would rather scan them.
    db.batch_execute("VACUUM ANALYZE").await.unwrap();
    holder
}

/// The buffers a call reads, on average.
async fn of_calls(db: &Db, call: &str) -> f64 {
    let mut samples = Vec::new();
    for _ in 0..SAMPLES {
        samples.push(of_call(db, call).await);
    }
    average(samples)
}

pub async fn of_call(db: &Db, call: &str) -> i64 {
    buffers(db, &format!("SELECT * FROM sqlstreams.{call}")).await
}

/// Runs statements over and over on the server, each round in transactions of its own.
async fn repeat(db: &Db, times: i64, body: &str) {
    db.batch_execute(&format!(
        "DO $repeat$ DECLARE t uuid; BEGIN FOR i IN 1..{times} LOOP {body} COMMIT; END LOOP; END $repeat$"
    ))
    .await
    .unwrap();
}

fn assert_flat(what: &str, before: f64, after: f64) {
    println!("{what}: {before:.1} → {after:.1} buffers per call after {} calls", calls());
    assert!(after <= before * 1.5, "{what}: {before:.1} buffers per call became {after:.1}");
}

/// advance, and what looks at the same rows: poll, fetch, is_resolved, the views.
#[tokio::test(flavor = "multi_thread")]
async fn claims_and_settlements_read_no_more_than_before() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(calls() + 10_000).await;
    // A lease that stays open all the time, kept alive as a consumer does.
    let old = plain.claim(1).await.unwrap();
    let _holder = pinned(&url, &plain.db).await;

    let advance = format!(
        "advance(1, {0}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 1)",
        plain.group
    );
    let step = format!(
        "t := gen_random_uuid();
         PERFORM sqlstreams.advance(1, {0}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 1, t);
         COMMIT;
         PERFORM sqlstreams.settle(1, {0}, 0, t, '{{(,)}}');
         IF i % 100 = 0 THEN PERFORM sqlstreams.extend(1, {0}, ARRAY[1], ARRAY['{1}'::uuid], ARRAY['{{}}'::int8multirange]); END IF;",
        plain.group, old.token
    );
    let measured = [
        advance.clone(),
        format!("poll(1, {})", plain.group),
        format!("is_resolved(1, {}, 1)", plain.group),
        "list_cursors()".to_owned(),
        format!("fetch(1, {}, '{}', 0, 1, 1000, NULL::json)", plain.group, old.token),
    ];
    let before = over_a_cycle(&plain, &measured, &step, old.token).await;
    repeat(&plain.db, calls(), &step).await;
    let after = over_a_cycle(&plain, &measured, &step, old.token).await;
    for ((call, before), after) in measured.iter().zip(before).zip(after) {
        assert_flat(call.split('(').next().unwrap(), before, after);
    }
    let rows = count(&plain.db, "SELECT count(*) FROM sqlstreams.consumer_group_cursor_1").await;
    assert_eq!(rows, 1, "one cursor row, whatever lies dead behind it");
}

/// The buffers of each call, on average over the time in which the old lease is left behind and moved up once.
async fn over_a_cycle(plain: &Plain, calls: &[String], step: &str, keep: uuid::Uuid) -> Vec<f64> {
    const POINTS: i64 = 6;
    const TIMES: i64 = 20;
    let mut samples = vec![Vec::new(); calls.len()];
    for _ in 0..POINTS {
        repeat(&plain.db, 1_000 / POINTS, step).await;
        for (call, samples) in calls.iter().zip(&mut samples) {
            for _ in 0..TIMES {
                samples.push(of_call(&plain.db, call).await);
            }
        }
        // What `advance` left behind.
        let leases = plain.leases();
        let sql = format!(
            "SELECT sqlstreams.settle(1, {}, seq, token, '{{(,)}}') FROM (SELECT seq, token FROM {leases} WHERE token <> '{keep}' OFFSET 0) AS l",
            plain.group
        );
        plain.db.batch_execute(&sql).await.unwrap();
    }
    samples.into_iter().map(average).collect()
}

/// Exceptions are claimed with the bound that callers pass, and settled by their key.
#[tokio::test(flavor = "multi_thread")]
async fn exceptions_are_drained_at_a_constant_cost() {
    let url = database().await;
    let plain = installed(&url).await;
    let rows = 2 * calls();
    plain.produce(rows).await;
    // Rows that were in flight are older than a lease, as after minutes of draining.
    plain
        .db
        .batch_execute("UPDATE sqlstreams.consumer_group SET lease_duration = '1 second'")
        .await
        .unwrap();
    // Failed over many hours, in batches, and all due.
    let fill = format!(
        "INSERT INTO {} (group_id, message_id, state, attempts, due_at)
         SELECT $1, id, 'ready', 1, clock_timestamp() - ({rows} - id) * interval '2 seconds' FROM {}",
        plain.exceptions(),
        plain.log()
    );
    plain.db.execute(&fill, &[&plain.group]).await.unwrap();
    let _holder = pinned(&url, &plain.db).await;
    plain
        .db
        .batch_execute(&format!(
            "CREATE TABLE bound (due timestamptz); INSERT INTO bound VALUES ('-infinity');
             CREATE FUNCTION drain() RETURNS void LANGUAGE plpgsql AS $$
             DECLARE
                 t uuid := gen_random_uuid();
                 ids bigint[];
                 earliest timestamptz := (SELECT due FROM bound);
             BEGIN
                 SELECT array_agg(id), min(due_at) INTO ids, earliest
                     FROM sqlstreams.claim_exceptions(1, {0}, t, 5, false, earliest, NULL::json);
                 PERFORM sqlstreams.settle_exceptions(1, {0}, array_fill(t, ARRAY[cardinality(ids)]), ids,
                     array_fill('ok'::text, ARRAY[cardinality(ids)]), array_fill(NULL::text, ARRAY[cardinality(ids)]));
                 UPDATE bound SET due = earliest - interval '1 second';
             END $$",
            plain.group
        ))
        .await
        .unwrap();
    let (before_claim, before_settle) = exception_buffers(&plain).await;
    repeat(&plain.db, rows / 5 - 100, "PERFORM drain();").await;
    let (after_claim, after_settle) = exception_buffers(&plain).await;
    assert_flat("claim_exceptions", before_claim, after_claim);
    assert_flat("settle_exceptions", before_settle, after_settle);
}

async fn exception_buffers(plain: &Plain) -> (f64, f64) {
    // Leases that ran out in the last second are looked for by every call, so how many rows lie dead there depends on the
    // speed of what ran before; when this is over, none do.
    tokio::time::sleep(Duration::from_millis(2_300)).await;
    let (mut claims, mut settlements) = (Vec::new(), Vec::new());
    for _ in 0..31 {
        let token = uuid::Uuid::new_v4();
        let claim = format!(
            "claim_exceptions(1, {}, '{token}', 1, false, (SELECT due FROM bound), NULL::json)",
            plain.group
        );
        claims.push(of_call(&plain.db, &claim).await);
        let sql = format!("SELECT message_id FROM {} WHERE lease_id = $1", plain.exceptions());
        let id: i64 = plain.db.query_one(&sql, &[&token]).await.unwrap().get(0);
        let settle = format!(
            "settle_exceptions(1, {}, '{{{token}}}', '{{{id}}}', '{{ok}}', '{{x}}')",
            plain.group
        );
        settlements.push(of_call(&plain.db, &settle).await);
    }
    (middle(claims), middle(settlements))
}

/// A gap that is looked at again and again, behind a producer that does not end.
#[tokio::test(flavor = "multi_thread")]
async fn looks_at_a_gap_read_no_more_than_before() {
    let url = database().await;
    let plain = installed(&url).await;
    let _holder = pinned(&url, &plain.db).await;
    let open = plain.again(&url).await;
    open.db.batch_execute("BEGIN").await.unwrap();
    open.produce(1).await;
    plain.produce(1).await;
    plain.db.batch_execute("VACUUM ANALYZE").await.unwrap();
    // Without the pause between two looks.
    plain
        .db
        .batch_execute(
            "CREATE FUNCTION sqlstreams.look() RETURNS bigint LANGUAGE plpgsql SET search_path = sqlstreams SET enable_seqscan = off AS $$
             BEGIN
                 UPDATE stream_fence SET looked_at = NULL
                     WHERE (stream_id, generation) = (SELECT stream_id, generation FROM stream_fence WHERE stream_id = 1 ORDER BY generation DESC LIMIT 1);
                 RETURN look_at_gap(1, 0);
             END $$",
        )
        .await
        .unwrap();
    let before = of_calls(&plain.db, "look()").await;
    repeat(&plain.db, calls() / 3, "PERFORM sqlstreams.look();").await;
    let after = of_calls(&plain.db, "look()").await;
    assert_flat("look_at_gap", before, after);
    assert_eq!(count(&plain.db, "SELECT count(*) FROM sqlstreams.stream_fence").await, 1);
    let rotated = count(&plain.db, "SELECT max(generation) FROM sqlstreams.stream_fence").await;
    assert!(rotated > 2, "rotated only {rotated} times");
}

/// A holder of lanes that has one lease for very long, and others all the time.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_of_lanes_that_lives_long_is_not_left_behind() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.db.batch_execute("SELECT sqlstreams.set_mode(1, 1, 'ordered')").await.unwrap();
    plain.produce(4 * calls()).await;
    let (holder, old) = (uuid::Uuid::new_v4(), uuid::Uuid::new_v4());
    let call = |tokens: &str, done: &str, finished: &str, limit: u32, token: &str| {
        format!(
            "advance_lanes(1, 1, '{holder}', NULL, {tokens}, {done}, {finished}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', {limit}, false, {token})"
        )
    };
    let first = call("'{}'", "'{}'", "'{}'", 1, &format!("'{old}'"));
    plain.db.batch_execute(&format!("SELECT sqlstreams.{first}")).await.unwrap();
    let _holder = pinned(&url, &plain.db).await;
    let one = format!("'{{{old}}}'");
    let step = format!(
        "t := gen_random_uuid(); PERFORM sqlstreams.{}; COMMIT; PERFORM sqlstreams.{};",
        call(&one, "'{\"{}\"}'", "'{f}'", 1, "t"),
        call(&format!("ARRAY['{old}'::uuid, t]"), "'{\"{}\", \"{(,)}\"}'", "'{f,t}'", 0, "t"),
    );
    let measured =
        ["poll(1, 1)".to_owned(), call(&one, "'{\"{}\"}'", "'{f}'", 0, "gen_random_uuid()")];
    // Over the time in which it is left behind and moved up.
    let cycle = async || {
        let mut samples = [const { Vec::new() }; 2];
        for _ in 0..10 {
            repeat(&plain.db, 103, &step).await;
            for (call, samples) in measured.iter().zip(&mut samples) {
                samples.push(of_call(&plain.db, call).await);
            }
        }
        samples.map(average)
    };
    let before = cycle().await;
    repeat(&plain.db, calls(), &step).await;
    let after = cycle().await;
    assert_flat("poll", before[0], after[0]);
    assert_flat("advance_lanes", before[1], after[1]);
    let open = "SELECT count(*) FROM sqlstreams.consumer_lease_1";
    assert_eq!(count(&plain.db, open).await, 1);
}

/// What is replayed is cut in pieces as cheaply at the end as at the beginning, however many rows lie dead behind; and so is what is read again past dead
/// letters.
#[tokio::test(flavor = "multi_thread")]
async fn replays_and_rereading_read_no_more_than_before() {
    let url = database().await;
    let plain = installed(&url).await;
    let all = 2 * calls() + 10_000;
    plain.produce(all).await;
    while let Some(lease) = plain.claim(1_000).await {
        let dead: Vec<_> = crate::plain::ids_of(&lease.pending)
            .into_iter()
            .filter(|id| id % 100 == 0)
            .map(|id| (id, "dead", None))
            .collect();
        assert!(plain.fail(&lease, &dead).await && plain.settle(&lease, "{(,)}").await);
    }
    let _holder = pinned(&url, &plain.db).await;
    let group = plain.group;
    let advance = format!(
        "advance(1, {group}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 1)"
    );
    let step = format!(
        "t := gen_random_uuid();
         PERFORM sqlstreams.advance(1, {group}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 1, t);
         COMMIT;
         PERFORM sqlstreams.settle(1, {group}, 0, t, '{{(,)}}');"
    );
    let settle = format!(
        "SELECT sqlstreams.settle(1, {group}, seq, token, '{{(,)}}') FROM (SELECT seq, token FROM {} OFFSET 0) AS l",
        plain.leases()
    );
    for (what, begin) in [
        ("replay", format!("SELECT sqlstreams.replay(1, {group})")),
        ("reread", format!("SELECT sqlstreams.seek(1, {group}, 'beginning')")),
    ] {
        plain.db.batch_execute(&begin).await.unwrap();
        repeat(&plain.db, 300, &step).await;
        let before = of_calls(&plain.db, &advance).await;
        plain.db.batch_execute(&settle).await.unwrap();
        repeat(&plain.db, calls(), &step).await;
        let after = of_calls(&plain.db, &advance).await;
        plain.db.batch_execute(&settle).await.unwrap();
        assert_flat(what, before, after);
        plain.db.query("SELECT sqlstreams.cancel_replay(1, $1)", &[&group]).await.unwrap();
    }
}
