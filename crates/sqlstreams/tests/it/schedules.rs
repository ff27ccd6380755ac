//! Schedules: at each of their times one message, whoever is at it and whatever becomes of him.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use sqlstreams::{Client, ErrorKind, Missed, Outgoing, RunKind, ScheduleState, Stream};
use tokio_postgres::Client as Db;

use crate::buffers::usual;
use crate::support::{client, client_at, connect, count, database, eventually};

const LOG: &str = "SELECT count(*) FROM sqlstreams.message_log_1";
const HOUR: Duration = Duration::from_secs(3600);

async fn stream(client: &Client) -> Stream<u64> {
    client.stream::<u64>("jobs").create().await.unwrap()
}

/// Makes the times of a schedule go so far back, as if nobody had looked at it since.
async fn neglect(db: &Db, name: &str, interval: &str) {
    db.batch_execute(&format!(
        "UPDATE sqlstreams.schedule SET since = date_trunc('second', clock_timestamp()) - interval '{interval}' WHERE name = '{name}';
         UPDATE sqlstreams.schedule_turn AS t SET done_until = s.since, due_at = clock_timestamp(), fire_at = NULL
             FROM sqlstreams.schedule AS s WHERE s.id = t.schedule_id AND s.name = '{name}'"
    ))
    .await
    .unwrap();
}

/// Lets it be tried again at once.
async fn hurry(db: &Db) {
    db.batch_execute(
        "UPDATE sqlstreams.schedule_turn SET due_at = clock_timestamp() WHERE due_at IS NOT NULL",
    )
    .await
    .unwrap();
}

/// How often there is a message for each time of a schedule, in seconds since 1970.
async fn fired(db: &Db, name: &str) -> BTreeMap<i64, i64> {
    let rows = db
        .query(
            "SELECT extract(epoch FROM (headers->>'fire_time')::timestamptz)::bigint, count(*) FROM sqlstreams.message_log_1
             WHERE headers->>'schedule' = $1 GROUP BY 1",
            &[&name],
        )
        .await
        .unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_at_each_of_its_times() {
    let (client, db) = client().await;
    let stream = stream(&client).await;
    let headers = json!({"by": "hand", "schedule": "somebody else's"});
    let message = Outgoing::new(&7).key("k").routing_key("a.b").expires_in(HOUR);
    let message = message.headers(headers.as_object().unwrap().clone());
    let schedule = client.schedule("every second").cron("* * * * * *").produce(&stream, message);
    let schedule = schedule.create().await.unwrap();
    let first = schedule.info().await.unwrap().next_fire.unwrap();
    // As somebody does who sees to the upkeep: asleep until the next is due.
    let mut produced = 0;
    while produced < 3 {
        let fired = client.fire_schedules().await.unwrap();
        produced += fired.produced;
        assert_eq!(fired.failed, 0);
        tokio::time::sleep(fired.next.unwrap()).await;
    }
    let ids: Vec<i64> = (1..=3).collect();
    for (n, message) in stream.read(&ids).await.unwrap().iter().enumerate() {
        assert_eq!((message.payload, message.key.as_deref()), (7, Some("k")));
        assert_eq!(message.routing_key.as_deref(), Some("a.b"));
        assert_eq!(message.headers["by"], "hand");
        assert_eq!(message.headers["schedule"], "every second");
        let time = first + Duration::from_secs(n as u64);
        assert!(message.produced_at >= time, "{message:?}");
        let text: String =
            db.query_one("SELECT sqlstreams.fire_time_text($1)", &[&time]).await.unwrap().get(0);
        assert_eq!(message.headers["fire_time"], Value::from(text));
    }
    let sql = "SELECT count(*) FROM sqlstreams.message_log_1 WHERE expires_at > produced_at + interval '59 minutes'";
    assert_eq!(count(&db, sql).await, count(&db, LOG).await);
    let history = schedule.history(None, 2).await.unwrap();
    assert!(history[0].number == history[1].number + 1 && history[0].kind == RunKind::Due);
    let before = schedule.history(Some(history[1].number), 100).await.unwrap();
    assert_eq!(before.first().map(|run| run.number), Some(history[1].number - 1));
    assert_eq!(before.last().map(|run| (run.number, run.message_id)), Some((1, Some(1))));
    let info = schedule.info().await.unwrap();
    assert_eq!((info.state, info.last_fire), (ScheduleState::Active, Some(history[0].fire_time)));
}

/// Over two years, told day by day by PostgreSQL's own time zones.
#[tokio::test(flavor = "multi_thread")]
async fn tb_128_one_message_a_day_over_the_changes_of_the_clocks() {
    let (client, db) = client().await;
    let stream = stream(&client).await;
    for zone in ["Europe/Berlin", "America/New_York"] {
        let builder = client.schedule(zone).cron("30 2 * * *").zone(zone).missed(Missed::All);
        let builder = builder.catch_up(1_000).produce(&stream, Outgoing::new(&1));
        builder.create().await.unwrap();
        neglect(&db, zone, "800 days").await;
    }
    let fired = client.fire_schedules().await.unwrap();
    assert_eq!(fired.failed, 0);
    for (zone, changes) in [("Europe/Berlin", 4), ("America/New_York", 4)] {
        let row = db
            .query_one(
                "SELECT count(*), count(DISTINCT day), (max(day) - min(day) + 1)::bigint,
                        count(*) FILTER (WHERE time <> '02:30'), count(*) FILTER (WHERE time NOT IN ('02:30', '03:00'))
                 FROM (SELECT (t AT TIME ZONE $1)::date AS day, (t AT TIME ZONE $1)::time AS time
                       FROM (SELECT (headers->>'fire_time')::timestamptz AS t FROM sqlstreams.message_log_1 WHERE headers->>'schedule' = $1) AS x) AS y",
                &[&zone],
            )
            .await
            .unwrap();
        let [messages, days, span, moved, wrong] = [0, 1, 2, 3, 4].map(|i| row.get::<_, i64>(i));
        assert!(messages >= 799 && messages == days && days == span, "{zone}: {row:?}");
        // Forward they go once a year.
        assert!((2..changes).contains(&moved) && wrong == 0, "{zone}: {moved} {wrong}");
    }
}

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
async fn what_was_missed_is_made_up_for_as_the_schedule_says() {
    let (client, db) = client().await;
    let stream = stream(&client).await;
    // Seven times were missed. Whatever becomes of them, the next one comes.
    for (missed, produced, not_produced) in
        [(Missed::Skip, 0, 7), (Missed::Once, 1, 6), (Missed::All, 4, 3)]
    {
        let name = missed.as_str();
        let builder = client.schedule(name).cron("@every 10m").missed(missed).catch_up(4);
        let schedule = builder.produce(&stream, Outgoing::new(&1)).create().await.unwrap();
        neglect(&db, name, "75 minutes").await;
        assert_eq!(client.fire_schedules().await.unwrap().produced, produced);
        let info = schedule.info().await.unwrap();
        assert_eq!((info.produced as u64, info.not_produced), (produced, not_produced), "{name}");
        assert_eq!(info.next_fire, Some(info.since + Duration::from_secs(80 * 60)), "{name}");
        let history = schedule.history(None, 100).await.unwrap();
        let latest = Some(info.since + Duration::from_secs(70 * 60));
        assert_eq!(history.first().map(|run| run.fire_time), latest, "{name}");
        let kind = if produced == 0 { RunKind::Skipped } else { RunKind::CaughtUp };
        assert!(history.iter().all(|run| run.kind == kind), "{name}: {history:?}");
        assert_eq!(history.last().unwrap().missed, not_produced);
        assert_eq!(history.iter().map(|run| run.missed).sum::<i64>(), not_produced, "{name}");
        assert_eq!(fired(&db, name).await.len() as u64, produced, "{name}");
    }
    // The first of those that are produced says how many are not.
    let sql = "SELECT count(*) FROM sqlstreams.message_log_1 WHERE headers @> '{\"schedule\": \"all\", \"missed\": 3}' AND id = 2";
    assert_eq!(count(&db, sql).await, 1);
    let sql = "SELECT count(*) FROM sqlstreams.message_log_1 WHERE headers ? 'missed'";
    assert_eq!(count(&db, sql).await, 2);
    // And the history does not grow for ever.
    let schedule = client.schedule("long").cron("@every 10m").missed(Missed::All).catch_up(250);
    let schedule = schedule.produce(&stream, Outgoing::new(&1)).create().await.unwrap();
    for _ in 0..2 {
        neglect(&db, "long", "2995 minutes").await;
        assert_eq!(client.fire_schedules().await.unwrap().produced, 250);
        assert_eq!(schedule.history(None, 1_000).await.unwrap().len(), 100);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pausing_going_on_and_running_by_hand() {
    let (client, db) = client().await;
    let stream = stream(&client).await;
    let builder = client.schedule("s").cron("@every 10m").missed(Missed::All);
    let schedule = builder.produce(&stream, Outgoing::new(&1)).create().await.unwrap();
    neglect(&db, "s", "25 minutes").await;
    assert!(schedule.pause().await.unwrap() && !schedule.pause().await.unwrap());
    assert_eq!(client.fire_schedules().await.unwrap(), Default::default());
    let info = schedule.info().await.unwrap();
    assert_eq!((info.state, info.next_fire), (ScheduleState::Paused, None));
    assert_eq!(schedule.run_now().await.unwrap(), 1);
    assert_eq!(schedule.history(None, 9).await.unwrap()[0].kind, RunKind::Manual);
    // A change does not set it going.
    client.schedule("s").cron("@every 5m").alter().await.unwrap();
    assert_eq!(client.fire_schedules().await.unwrap(), Default::default());
    neglect(&db, "s", "25 minutes").await;
    db.batch_execute("UPDATE sqlstreams.schedule_turn SET due_at = NULL").await.unwrap();
    assert!(schedule.resume().await.unwrap() && !schedule.resume().await.unwrap());
    let fired = client.fire_schedules().await.unwrap();
    assert_eq!(fired.produced, 0);
    assert!(fired.next.unwrap() <= Duration::from_secs(5 * 60));
    // Neither does running it now change when it runs next.
    let next = schedule.info().await.unwrap().next_fire;
    assert_eq!(schedule.run_now().await.unwrap(), 2);
    let info = schedule.info().await.unwrap();
    assert_eq!((info.next_fire, info.produced, info.last_message), (next, 2, Some(2)));
    let actions = "SELECT count(*) FROM sqlstreams.audit WHERE detail->>'schedule' = 's' AND stream_name = 'jobs'
                   AND action IN ('create_schedule', 'pause_schedule', 'run_schedule', 'alter_schedule', 'resume_schedule')";
    assert_eq!(count(&db, actions).await, 6);
    schedule.clone().drop_schedule().await.unwrap();
    for error in [
        schedule.info().await.unwrap_err(),
        schedule.pause().await.unwrap_err(),
        schedule.resume().await.unwrap_err(),
        schedule.run_now().await.unwrap_err(),
        schedule.history(None, 1).await.unwrap_err(),
        schedule.drop_schedule().await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::UnknownSchedule, "{error:?}");
        assert!(error.hint().is_some());
    }
    assert_eq!(count(&db, LOG).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_time_comes_once_and_then_it_is_over() {
    let (client, db) = client().await;
    let stream = stream(&client).await;
    let at = SystemTime::now() + Duration::from_secs(2);
    let builder = client.schedule("once").at(at).produce(&stream, Outgoing::new(&1));
    let schedule = builder.create().await.unwrap();
    let mut produced = 0;
    while produced == 0 {
        let fired = client.fire_schedules().await.unwrap();
        produced = fired.produced;
        tokio::time::sleep(fired.next.unwrap_or_default()).await;
    }
    let info = schedule.info().await.unwrap();
    assert_eq!((info.state, info.next_fire, info.last_fire), (ScheduleState::Over, None, info.at));
    assert_eq!(client.fire_schedules().await.unwrap(), Default::default());
    let sql = "SELECT count(*) FROM sqlstreams.message_log_1 WHERE produced_at >= (headers->>'fire_time')::timestamptz";
    assert_eq!(count(&db, sql).await, 1);
    // A program that says at its start what there is to be may be started later, too.
    let builder = client.schedule("once").at(at).produce(&stream, Outgoing::new(&1));
    builder.create_or_replace().await.unwrap();
    assert_eq!(schedule.info().await.unwrap().state, ScheduleState::Over);
    // Another time starts it again.
    client.schedule("once").at(SystemTime::now() + HOUR).alter().await.unwrap();
    assert_eq!(schedule.info().await.unwrap().state, ScheduleState::Active);
    let past = client.schedule("once").at(SystemTime::now() - HOUR).alter().await.unwrap_err();
    assert_eq!(past.kind(), ErrorKind::InvalidArgument);
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

#[tokio::test(flavor = "multi_thread")]
async fn creating_replacing_and_changing() {
    let (client, db) = client().await;
    let stream = stream(&client).await;
    let builder = || client.schedule("s").cron("30 2 * * *").zone("Europe/Berlin");
    let same = || builder().produce(&stream, Outgoing::new(&1).key("k"));
    let schedule = same().create_or_replace().await.unwrap();
    let info = schedule.info().await.unwrap();
    assert_eq!((info.payload.as_deref(), info.missed), (Some("1"), Missed::Once));
    assert_eq!(same().create().await.unwrap_err().kind(), ErrorKind::ScheduleExists);
    // What is the same is not written, and goes on as it was.
    let turn = "SELECT max(turn) FROM sqlstreams.schedule_turn";
    let before = count(&db, turn).await;
    same().create_or_replace().await.unwrap();
    assert_eq!((count(&db, turn).await, &schedule.info().await.unwrap()), (before, &info));
    // Another message does not change the times, and is changed as a whole.
    builder().produce(&stream, Outgoing::new(&2)).create_or_replace().await.unwrap();
    let changed = schedule.info().await.unwrap();
    assert_eq!((changed.next_fire, changed.since), (info.next_fire, info.since));
    assert_eq!((changed.payload.as_deref(), changed.key), (Some("2"), None));
    client.schedule("s").missed(Missed::Skip).grace(HOUR).alter().await.unwrap();
    let changed = schedule.info().await.unwrap();
    assert_eq!((changed.missed, changed.grace), (Missed::Skip, HOUR));
    assert_eq!((changed.payload.as_deref(), changed.next_fire), (Some("2"), info.next_fire));
    client.schedule("s").cron("@hourly").alter().await.unwrap();
    let changed = schedule.info().await.unwrap();
    assert!(changed.next_fire < info.next_fire && changed.since > info.since);
    assert_eq!(changed.zone, "Europe/Berlin");
    // For another stream it is replaced.
    let other = client.stream::<Option<u64>>("other").compacted(true).create().await.unwrap();
    let to_other =
        || client.schedule("s").cron("@hourly").produce(&other, Outgoing::tombstone("k"));
    assert_eq!(to_other().alter().await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    to_other().create_or_replace().await.unwrap();
    let changed = schedule.info().await.unwrap();
    assert_eq!((changed.stream.as_str(), changed.payload), ("other", None));
    schedule.run_now().await.unwrap();
    assert!(other.read(&[1]).await.unwrap()[0].tombstone);

    let bytes = client.stream::<Vec<u8>>("bytes").codec::<sqlstreams::Bytes>();
    let bytes = bytes.create().await.unwrap();
    let raw = b"\x00\xff\\".to_vec();
    let builder = client.schedule("raw").cron("@daily").produce(&bytes, Outgoing::new(&raw));
    let id = builder.create().await.unwrap().run_now().await.unwrap();
    assert_eq!(bytes.read(&[id]).await.unwrap()[0].payload, raw);

    for (builder, kind) in [
        (client.schedule("x").cron("@daily"), ErrorKind::InvalidArgument),
        (client.schedule("x").produce(&stream, Outgoing::new(&1)), ErrorKind::InvalidArgument),
        (
            client.schedule("").cron("@daily").produce(&stream, Outgoing::new(&1)),
            ErrorKind::InvalidName,
        ),
        (
            client.schedule("x").cron("@daily").zone("X/Y").produce(&stream, Outgoing::new(&1)),
            ErrorKind::InvalidArgument,
        ),
        (
            client.schedule("x").cron("61 * * * *").produce(&stream, Outgoing::new(&1)),
            ErrorKind::InvalidArgument,
        ),
        (
            client.schedule("x").at(SystemTime::UNIX_EPOCH).produce(&stream, Outgoing::new(&1)),
            ErrorKind::InvalidArgument,
        ),
        (
            client
                .schedule("x")
                .cron("@daily")
                .grace(Duration::ZERO)
                .produce(&stream, Outgoing::new(&1)),
            ErrorKind::InvalidArgument,
        ),
        (
            client.schedule("x").cron("@daily").catch_up(0).produce(&stream, Outgoing::new(&1)),
            ErrorKind::InvalidArgument,
        ),
        (
            client.schedule("x").cron("@daily").produce(&stream, Outgoing::new(&1).delay(HOUR)),
            ErrorKind::InvalidArgument,
        ),
        (
            client
                .schedule("x")
                .cron("@daily")
                .produce(&stream, Outgoing::new(&1).idempotency_key("k")),
            ErrorKind::InvalidArgument,
        ),
        (
            client.schedule("x").cron("@daily").produce(&other, Outgoing::new(&None)),
            ErrorKind::InvalidMessage,
        ),
    ] {
        let error = builder.create_or_replace().await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(kind == ErrorKind::InvalidName || error.hint().is_some(), "{error:?}");
    }
    let error = client.schedule("x").open().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownSchedule);
    assert_eq!(error.hint(), Some(r#"Schedules that exist: "raw", "s"."#));
    assert_eq!(client.schedules(Some("raw"), 9).await.unwrap().len(), 1);
    for (sql, state) in [
        ("create_schedule('y', 'jobs', 'no json', p_cron => '@daily')", "22P02"),
        ("create_schedule('y', 'jobs', NULL, p_cron => '@daily')", "SQ004"),
        ("create_schedule('y', 'jobs', '1')", "SQ004"),
        (
            "create_schedule('y', 'jobs', '1', p_cron => '@daily', p_at => now() + interval '1 h')",
            "SQ004",
        ),
        ("create_schedule('y', 'jobs', '1', p_at => 'infinity')", "SQ004"),
        ("create_schedule('y', 'jobs', '1', p_cron => '@daily', p_missed => 'never')", "SQ004"),
        ("create_schedule('y', 'nowhere', '1', p_cron => '@daily')", "SQ001"),
        ("create_schedule('raw', 'jobs', '1', p_cron => '@daily')", "SQ031"),
        ("create_schedule('y', 'other', '1', p_cron => '@daily')", "SQ004"),
        ("alter_schedule('y')", "SQ030"),
        ("pause_schedule(NULL)", "SQ030"),
        ("run_schedule('y')", "SQ030"),
    ] {
        let error = db.batch_execute(&format!("SELECT sqlstreams.{sql}")).await.unwrap_err();
        assert_eq!(error.code().map(|code| code.code()), Some(state), "{sql}: {error:?}");
    }
}

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
        all.map(usual)
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
