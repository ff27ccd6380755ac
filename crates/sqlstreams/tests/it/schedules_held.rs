//! Schedules that somebody has in hand, that fail, or whose stream is in the way: none keeps another, and no time is lost or doubled.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use sqlstreams::{Client, Missed, Outgoing, ScheduleState};

use crate::schedules::{LOG, fired, hurry, neglect, stream};
use crate::support::{client, client_at, connect, count, database, eventually};

/// Twenty at once, whose connections are cut and who are dropped in the middle.
#[tokio::test(flavor = "multi_thread")]
async fn tb_107_twenty_who_fire_and_are_killed_produce_each_time_once() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = stream(&client).await;
    let names: Vec<String> = (0..20).map(|n| format!("s{n}")).collect();
    for name in &names {
        let builder = client.schedule(name).cron("* * * * * *").missed(Missed::All).catch_up(1_000);
        builder.produce(&stream, Outgoing::new(&1)).create().await.unwrap();
        neglect(&db, name, "40 seconds").await;
    }
    // The server's end of a connection dies after the insert, or at the commit, now and then.
    db.batch_execute(
        "CREATE SEQUENCE kills;
         CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF random() < TG_ARGV[0]::float8 THEN PERFORM nextval('public.kills'), pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(1); END IF;
             RETURN NULL; END $$;
         CREATE TRIGGER die AFTER INSERT ON sqlstreams.message_log_1 FOR EACH STATEMENT EXECUTE FUNCTION die(0.1);
         CREATE CONSTRAINT TRIGGER die AFTER INSERT ON sqlstreams.schedule_turn DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION die(0.1)",
    )
    .await
    .unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let mut firing = Vec::new();
    for _ in 0..20 {
        let (url, over) = (url.clone(), over.clone());
        firing.push(tokio::spawn(async move {
            let mut failed = 0;
            while !over.load(Ordering::SeqCst) {
                let Ok(client) = Client::builder(&url).migrate(false).connect().await else {
                    continue;
                };
                // Dropped at any point of the conversation.
                let patience = Duration::from_millis(fastrand::u64(1..120));
                match tokio::time::timeout(patience, client.fire_schedules()).await {
                    Ok(Ok(_)) | Err(_) => {}
                    Ok(Err(_)) => failed += 1,
                }
            }
            failed
        }));
    }
    let enough = "SELECT count(*) FROM sqlstreams.schedule_status WHERE produced >= 46";
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut killed = 0;
    while count(&db, enough).await < 20 || killed < 10 {
        assert!(Instant::now() < deadline, "only {killed} were killed");
        tokio::time::sleep(Duration::from_millis(50)).await;
        killed = count(&db, "SELECT last_value FROM kills").await;
    }
    over.store(true, Ordering::SeqCst);
    let mut failed = 0;
    for task in firing {
        failed += task.await.unwrap();
    }
    // What was under way when the last were dropped.
    eventually(async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state <> 'idle' AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
        count(&db, sql).await == 0
    })
    .await;
    println!("{killed} connections killed, {failed} calls failed");
    for name in &names {
        let fired = fired(&db, name).await;
        let (first, last) = (*fired.keys().next().unwrap(), *fired.keys().last().unwrap());
        assert_eq!(fired.len() as i64, last - first + 1, "{name}: {fired:?}");
        assert!(fired.values().all(|count| *count == 1), "{name}: {fired:?}");
        let info = client.schedule(name).open().await.unwrap().info().await.unwrap();
        assert_eq!(info.produced, fired.len() as i64, "{name}");
        assert_eq!(info.not_produced, 0);
        let since = info.since.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        assert_eq!(first, since as i64 + 1, "{name}");
    }
}

/// While somebody holds a schedule or its stream, others neither wait nor are kept from the rest.
#[tokio::test(flavor = "multi_thread")]
async fn tb_107_nobody_waits_for_a_schedule_that_another_has() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = stream(&client).await;
    let other = client.stream::<u64>("other").create().await.unwrap();
    for (name, stream) in [("a", &stream), ("b", &stream), ("c", &other), ("d", &other)] {
        let builder = client.schedule(name).cron("@every 10m").missed(Missed::All);
        builder.produce(stream, Outgoing::new(&1)).create().await.unwrap();
        neglect(&db, name, "25 minutes").await;
    }
    let held = connect(&url).await;
    held.batch_execute(
        "BEGIN; SELECT FROM sqlstreams.schedule WHERE name = 'a' FOR NO KEY UPDATE;
         SELECT FROM sqlstreams.stream WHERE name = 'other' FOR UPDATE",
    )
    .await
    .unwrap();
    let mut produced = 0;
    let firing: Vec<_> = (0..50)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.fire_schedules().await.unwrap() })
        })
        .collect();
    for fired in firing {
        let fired = fired.await.unwrap();
        produced += fired.produced;
        assert!(fired.failed == 0 && fired.next.unwrap() <= Duration::from_millis(250));
    }
    assert_eq!((produced, count(&db, LOG).await), (2, 2));
    held.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(client.fire_schedules().await.unwrap().produced, 6);
}

/// A call that hangs, with the schedule in its hands: the others go on, and that one does when the call is gone.
#[tokio::test(flavor = "multi_thread")]
async fn tb_130_a_call_that_hangs_keeps_no_other_schedule() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = stream(&client).await;
    let other = client.stream::<u64>("other").create().await.unwrap();
    for (name, stream) in [("stuck", &stream), ("free", &other)] {
        let builder = client.schedule(name).cron("@every 10m").missed(Missed::All);
        builder.produce(stream, Outgoing::new(&1)).create().await.unwrap();
    }
    db.batch_execute(
        "CREATE TABLE gate (); INSERT INTO gate DEFAULT VALUES;
         CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN WHILE EXISTS (SELECT FROM public.gate) LOOP PERFORM pg_sleep(0.02); END LOOP; RETURN NULL; END $$;
         CREATE TRIGGER hang BEFORE INSERT ON sqlstreams.message_log_1 FOR EACH STATEMENT EXECUTE FUNCTION hang()",
    )
    .await
    .unwrap();
    neglect(&db, "stuck", "11 minutes").await;
    let hanging = tokio::spawn({
        let client = client.clone();
        async move { client.fire_schedules().await }
    });
    let stuck = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()";
    eventually(async || count(&db, stuck).await == 1).await;
    neglect(&db, "free", "25 minutes").await;
    let second = Client::connect(&url).await.unwrap();
    assert_eq!(second.fire_schedules().await.unwrap().produced, 2);
    assert_eq!(second.fire_schedules().await.unwrap().produced, 0);
    // Others would find it as it was; and so does the same process afterwards.
    db.batch_execute(
        "DELETE FROM gate; SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()",
    )
    .await
    .unwrap();
    assert!(hanging.await.unwrap().is_err());
    eventually(async || client.fire_schedules().await.is_ok_and(|fired| fired.produced == 1)).await;
    assert_eq!(count(&db, LOG).await, 1);
    assert_eq!(fired(&db, "stuck").await.into_values().collect::<Vec<_>>(), [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_fails_does_not_keep_the_others_and_is_tried_again() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = stream(&client).await;
    for (name, payload) in [("refused", 13), ("good", 1)] {
        let builder = client.schedule(name).cron("@every 10m").missed(Missed::All);
        builder.produce(&stream, Outgoing::new(&payload)).create().await.unwrap();
        neglect(&db, name, "25 minutes").await;
    }
    // What only shows when somebody looks: plain SQL takes any text.
    db.batch_execute(
        "ALTER TABLE sqlstreams.message_log_1 ADD CONSTRAINT luck CHECK (payload::text <> '13');
         SELECT sqlstreams.create_schedule('words', 'jobs', '1', p_cron => 'at noon');
         SELECT sqlstreams.create_schedule('nowhere', 'jobs', '1', p_cron => '@daily', p_zone => 'Mars/Olympus');
         SELECT sqlstreams.create_schedule('sql', 'jobs', '1', p_cron => '@daily', p_zone => 'Europe/Berlin')",
    )
    .await
    .unwrap();
    let fired = client.fire_schedules().await.unwrap();
    assert_eq!((fired.produced, fired.failed), (2, 3), "{fired:?}");
    let info = async |name: &str| client.schedule(name).open().await.unwrap().info().await.unwrap();
    for (name, said) in
        [("refused", "luck"), ("words", "no cron expression"), ("nowhere", "no time zone")]
    {
        let info = info(name).await;
        assert_eq!((info.state, info.failures), (ScheduleState::Failing, 1), "{name}");
        assert!(info.last_error.as_ref().unwrap().contains(said), "{info:?}");
        assert!(info.retry_at > info.failed_at && info.next_fire.is_none(), "{info:?}");
    }
    assert_eq!(info("sql").await.state, ScheduleState::Active);
    // Not again and again.
    let fired = client.fire_schedules().await.unwrap();
    assert!(fired.failed <= 3 && fired.next.unwrap() <= Duration::from_secs(2), "{fired:?}");
    hurry(&db).await;
    client.fire_schedules().await.unwrap();
    let refused = info("refused").await;
    assert!(refused.failures >= 2, "{refused:?}");
    db.batch_execute("ALTER TABLE sqlstreams.message_log_1 DROP CONSTRAINT luck").await.unwrap();
    hurry(&db).await;
    assert_eq!(client.fire_schedules().await.unwrap().produced, 2);
    let refused = info("refused").await;
    assert_eq!((refused.state, refused.failures), (ScheduleState::Active, 0));
    assert!(refused.last_error.is_some() && refused.next_fire.is_some());
    // One that was mended is tried at once.
    client.schedule("words").cron("0 12 * * *").alter().await.unwrap();
    client.schedule("nowhere").zone("Europe/Rome").alter().await.unwrap();
    assert_eq!(client.fire_schedules().await.unwrap().failed, 0);

    // A log that is locked: that one is put off, soon.
    neglect(&db, "good", "25 minutes").await;
    let held = connect(&url).await;
    held.batch_execute("BEGIN; LOCK TABLE sqlstreams.message_log_1").await.unwrap();
    let other = client.stream::<u64>("other").create().await.unwrap();
    let builder = client.schedule("free").cron("@every 10m").missed(Missed::All);
    builder.produce(&other, Outgoing::new(&1)).create().await.unwrap();
    neglect(&db, "free", "25 minutes").await;
    let fired = client.fire_schedules().await.unwrap();
    assert!(fired.produced == 2 && fired.failed >= 1, "{fired:?}");
    held.batch_execute("ROLLBACK").await.unwrap();
    hurry(&db).await;
    assert_eq!(client.fire_schedules().await.unwrap().produced, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_dropped_takes_its_schedules_along() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    for round in 0..5 {
        let stream = client.stream::<u64>("jobs").create().await.unwrap();
        for name in ["a", "b", "c"] {
            let builder = client.schedule(name).cron("* * * * * *").missed(Missed::All);
            let builder = builder.catch_up(1_000).produce(&stream, Outgoing::new(&1));
            builder.create().await.unwrap();
            neglect(&db, name, "10 minutes").await;
        }
        // While others fire them.
        let firing: Vec<_> = (0..4)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { client.fire_schedules().await })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..30))).await;
        stream.drop_stream().await.unwrap();
        for fired in firing {
            let fired = fired.await.unwrap().unwrap();
            assert_eq!(fired.failed, 0, "round {round}");
        }
        assert!(client.schedules(None, 10).await.unwrap().is_empty());
    }
    for table in ["schedule", "schedule_turn", "schedule_run"] {
        assert_eq!(count(&db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await, 0);
    }
    let sql = "SELECT count(*) FROM sqlstreams.audit WHERE action = 'drop_stream' AND detail = '{\"schedules\": [\"a\", \"b\", \"c\"]}'";
    assert_eq!(count(&db, sql).await, 5);
}

/// A log whose partitions are used up gets others.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_without_room_is_no_failure() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("jobs").partition_size(1_000).create().await.unwrap();
    let builder = client.schedule("s").cron("* * * * * *").missed(Missed::All).catch_up(1_000);
    let schedule = builder.produce(&stream, Outgoing::new(&1)).create().await.unwrap();
    for _ in 0..6 {
        neglect(&db, "s", "1 hour").await;
        let fired = client.fire_schedules().await.unwrap();
        assert!(fired.produced >= 1_000 && fired.failed == 0, "{fired:?}");
    }
    db.batch_execute(
        "SELECT setval('sqlstreams.message_log_1_id_seq', (SELECT 1000 * (max(substring(relname FROM '_p(\\d+)$')::bigint) + 1)
         FROM pg_class WHERE relname ~ '^message_log_1_p\\d+$'))",
    )
    .await
    .unwrap();
    schedule.run_now().await.unwrap();
}
