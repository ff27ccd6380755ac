//! Schedules: at each of their times one message. Who fires, and what comes in between, is in schedules_held.rs and schedules_upkeep.rs.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use sqlstreams::{Client, ErrorKind, Missed, Outgoing, RunKind, ScheduleState, Stream};
use tokio_postgres::Client as Db;

use crate::support::{client, count};

pub const LOG: &str = "SELECT count(*) FROM sqlstreams.message_log_1";
pub const HOUR: Duration = Duration::from_secs(3600);

pub async fn stream(client: &Client) -> Stream<u64> {
    client.stream::<u64>("jobs").create().await.unwrap()
}

/// Makes the times of a schedule go so far back, as if nobody had looked at it since.
pub async fn neglect(db: &Db, name: &str, interval: &str) {
    db.batch_execute(&format!(
        "UPDATE sqlstreams.schedule SET since = date_trunc('second', clock_timestamp()) - interval '{interval}' WHERE name = '{name}';
         UPDATE sqlstreams.schedule_turn AS t SET done_until = s.since, due_at = clock_timestamp(), fire_at = NULL
             FROM sqlstreams.schedule AS s WHERE s.id = t.schedule_id AND s.name = '{name}'"
    ))
    .await
    .unwrap();
}

/// Lets it be tried again at once.
pub async fn hurry(db: &Db) {
    db.batch_execute(
        "UPDATE sqlstreams.schedule_turn SET due_at = clock_timestamp() WHERE due_at IS NOT NULL",
    )
    .await
    .unwrap();
}

/// How often there is a message for each time of a schedule, in seconds since 1970.
pub async fn fired(db: &Db, name: &str) -> BTreeMap<i64, i64> {
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
