//! Whose clock decides about schedules, and who fires: the maintenance, beside everything else, at constant costs.

use std::time::Duration;

use sqlstreams::{Client, ErrorKind, Missed, Outgoing, RunKind};

use crate::buffers::middle;
use crate::schedules::{LOG, fired, neglect, stream};
use crate::support::{client, client_at, connect, count, database, eventually};

/// Whose clock is wrong, or who says what is not so, produces nothing.
#[tokio::test]
async fn the_server_s_clock_decides() {
    let (client, db) = client().await;
    let stream = stream(&client).await;
    let builder = client.schedule("s").cron("@every 10m").missed(Missed::All);
    builder.produce(&stream, Outgoing::new(&1)).create().await.unwrap();
    let turn = count(&db, "SELECT max(turn) FROM sqlstreams.schedule_turn").await;
    let fire = async |turn: i64, times: &str, until: &str, next: &str| {
        let sql = format!(
            "SELECT outcome FROM sqlstreams.fire_schedule(1, {turn}, ARRAY[{times}]::timestamptz[], 0, 0, NULL, {until}, {next})"
        );
        db.query_one(&sql, &[]).await.map(|row| row.get::<_, String>(0))
    };
    let ahead = "clock_timestamp() + interval '10 minutes'";
    let day = "clock_timestamp() + interval '1 day'";
    assert_eq!(fire(turn, ahead, ahead, day).await.unwrap(), "early");
    assert_eq!(fire(turn + 1, "", "clock_timestamp()", day).await.unwrap(), "gone");
    neglect(&db, "s", "25 minutes").await;
    let since = "(SELECT since FROM sqlstreams.schedule)";
    for (times, until, next) in [
        // What is done with; out of order; twice; beyond what is said to be done; a next time that has been.
        (since.to_string(), "clock_timestamp()", day),
        (
            format!("{since} + interval '20 min', {since} + interval '10 min'"),
            "clock_timestamp()",
            day,
        ),
        (
            format!("{since} + interval '20 min', {since} + interval '20 min'"),
            "clock_timestamp()",
            day,
        ),
        (format!("{since} + interval '20 min'"), &format!("{since} + interval '10 min'"), day),
        (format!("{since} + interval '20 min'"), "clock_timestamp()", since),
    ] {
        let error = fire(turn, &times, until, next).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "SQ004", "{error:?}");
    }
    assert_eq!(count(&db, LOG).await, 0);
    let times = format!("{since} + interval '10 min', {since} + interval '20 min'");
    assert_eq!(fire(turn, &times, "clock_timestamp()", day).await.unwrap(), "done");
    assert_eq!(fire(turn, &times, "clock_timestamp()", day).await.unwrap(), "gone");
    assert_eq!(count(&db, LOG).await, 2);
    // Where the server's clock was put back, nothing comes a second time.
    db.batch_execute(&format!(
        "UPDATE sqlstreams.schedule_turn SET done_until = {day}, due_at = clock_timestamp()"
    ))
    .await
    .unwrap();
    assert_eq!(client.fire_schedules().await.unwrap().produced, 0);
    assert_eq!(count(&db, LOG).await, 2);
}

/// Whoever may not write these tables cannot have others miss their schedules; whose default isolation is another can.
#[tokio::test(flavor = "multi_thread")]
async fn the_owner_fires_whatever_the_default_isolation() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = stream(&client).await;
    let builder = client.schedule("s").cron("@every 10m").missed(Missed::All);
    builder.produce(&stream, Outgoing::new(&1)).create().await.unwrap();
    neglect(&db, "s", "25 minutes").await;
    let password = url.split(['@', ':']).nth(2).unwrap();
    db.batch_execute(&format!(
        "CREATE ROLE firing LOGIN PASSWORD '{password}'; GRANT USAGE ON SCHEMA sqlstreams TO firing;
         GRANT SELECT ON ALL TABLES IN SCHEMA sqlstreams TO firing; ALTER ROLE firing SET default_transaction_isolation = 'serializable'"
    ))
    .await
    .unwrap();
    let firing = Client::builder(&url.replace("//postgres:", "//firing:")).migrate(false);
    let firing = firing.connect().await.unwrap();
    let error = firing.fire_schedules().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
    assert_eq!(firing.schedules(None, 9).await.unwrap().len(), 1);
    db.batch_execute("GRANT postgres TO firing").await.unwrap();
    assert_eq!(firing.fire_schedules().await.unwrap().produced, 2);
}

/// Looks read as much with thousands of schedules, and with rows that a snapshot keeps.
#[tokio::test(flavor = "multi_thread")]
async fn looks_read_no_more_than_before() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = stream(&client).await;
    let builder = client.schedule("s").cron("@every 1s").missed(Missed::Skip);
    builder.produce(&stream, Outgoing::new(&1)).create().await.unwrap();
    db.batch_execute(
        "DO $$ BEGIN FOR i IN 1..3000 LOOP PERFORM sqlstreams.create_schedule('x' || i, 'jobs', '1', p_cron => '@daily', p_next => clock_timestamp() + interval '1 day'); END LOOP; END $$",
    )
    .await
    .unwrap();
    let pinned = connect(&url).await;
    pinned
        .batch_execute(
            "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM sqlstreams.stream",
        )
        .await
        .unwrap();
    db.batch_execute("VACUUM ANALYZE").await.unwrap();
    let calls = [
        "due_schedules(clock_timestamp() - interval '1 second', 200)",
        "fire_schedule(1, (SELECT max(turn) FROM sqlstreams.schedule_turn WHERE schedule_id = 1), '{}', 0, 1, clock_timestamp(), clock_timestamp(), clock_timestamp() + interval '1 ms')",
        "list_schedules('s')",
    ];
    let measure = async || {
        let mut all = [const { Vec::new() }; 3];
        for _ in 0..21 {
            for (each, call) in all.iter_mut().zip(calls) {
                each.push(crate::horizon::of_call(&db, call).await);
            }
        }
        all.map(middle)
    };
    // Until its first time has come: before, nothing is fired.
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    measure().await;
    let before = measure().await;
    db.batch_execute(
        "DO $$ BEGIN FOR i IN 1..4000 LOOP
             PERFORM sqlstreams.fire_schedule(1, t.turn, '{}', 0, 1, clock_timestamp(), clock_timestamp(), clock_timestamp() + interval '1 ms')
                 FROM (SELECT turn FROM sqlstreams.schedule_turn WHERE schedule_id = 1 ORDER BY turn DESC LIMIT 1) AS t;
             COMMIT; END LOOP; END $$",
    )
    .await
    .unwrap();
    // So far back the looks go.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let after = measure().await;
    println!("{before:?} → {after:?} buffers per call");
    for (call, (before, after)) in calls.iter().zip(before.iter().zip(after)) {
        assert!(after <= before * 1.5, "{call}: {before} → {after}");
    }
    // The history holds the latest 100, also of rows that are dead and still there.
    let sql = "SELECT count(*) FROM sqlstreams.schedule_run WHERE schedule_id = 1";
    assert_eq!(count(&db, sql).await, 100);
}

/// Whoever consumes does the maintenance, and hears of schedules that others make.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_consumes_fires() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = stream(&client).await;
    let group = stream.group("g").create().await.unwrap();
    let mut consumer = crate::running::Running::start(&group);
    let holder = "SELECT count(*) FROM sqlstreams.maintenance WHERE holder IS NOT NULL";
    eventually(async || count(&db, holder).await == 1).await;
    let other = Client::connect(&url).await.unwrap();
    let jobs = other.stream::<u64>("jobs").open().await.unwrap();
    let builder = other.schedule("s").cron("* * * * * *").produce(&jobs, Outgoing::new(&7));
    let schedule = builder.create().await.unwrap();
    for _ in 0..6 {
        let limit = Duration::from_secs(30);
        assert_eq!(tokio::time::timeout(limit, consumer.handled.recv()).await.unwrap(), Some(7));
    }
    consumer.stop().await;
    let fired = fired(&db, "s").await;
    let (first, last) = (*fired.keys().next().unwrap(), *fired.keys().last().unwrap());
    assert_eq!(fired.len() as i64, last - first + 1, "{fired:?}");
    let mut late: Vec<Duration> = Vec::new();
    for run in schedule.history(None, 100).await.unwrap() {
        assert_eq!(run.kind, RunKind::Due);
        late.push(run.at.duration_since(run.fire_time).unwrap());
    }
    late.sort();
    println!("late by {late:?}");
    let failing = "SELECT count(*) FROM sqlstreams.maintenance_step WHERE step = 'schedules' AND failures = 0 AND runs >= 3";
    assert_eq!(count(&db, failing).await, 1);
}

/// Without a consumer, and without being told of what others change: by looking.
#[tokio::test(flavor = "multi_thread")]
async fn maintenance_alone_fires_also_while_another_step_takes_long() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = stream(&client).await;
    let stop = sqlstreams::CancellationToken::new();
    let alone = Client::connect(&url).await.unwrap();
    let running = tokio::spawn(alone.maintenance().stop_on(stop.clone()).run());
    let builder = client.schedule("s").cron("* * * * * *").produce(&stream, Outgoing::new(&7));
    builder.create().await.unwrap();
    eventually(async || count(&db, LOG).await >= 2).await;
    // A step that hangs: the look for keys that have outlived their time is made to wait.
    db.batch_execute(
        "CREATE TABLE gate (); INSERT INTO gate DEFAULT VALUES;
         CREATE OR REPLACE FUNCTION sqlstreams.keys_due(p_heads sqlstreams.stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval) LANGUAGE sql AS $$ SELECT 1::bigint, interval '0' $$;
         CREATE OR REPLACE FUNCTION sqlstreams.expire_idempotency_keys(p_stream bigint, p_from timestamptz DEFAULT '-infinity', p_limit bigint DEFAULT 10000) RETURNS TABLE (removed bigint, upto timestamptz)
         LANGUAGE plpgsql AS $$ BEGIN WHILE EXISTS (SELECT FROM public.gate) LOOP PERFORM pg_sleep(0.02); END LOOP; RETURN QUERY SELECT 0::bigint, clock_timestamp(); END $$",
    )
    .await
    .unwrap();
    let stuck = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()";
    eventually(async || count(&db, stuck).await == 1).await;
    let before = count(&db, LOG).await;
    eventually(async || count(&db, LOG).await >= before + 3).await;
    assert_eq!(count(&db, stuck).await, 1);
    db.batch_execute("DELETE FROM gate").await.unwrap();
    stop.cancel();
    running.await.unwrap().unwrap();
    assert!(fired(&db, "s").await.values().all(|count| *count == 1));
    let once = client.maintenance().once().await.unwrap();
    assert!(once.held);
}
