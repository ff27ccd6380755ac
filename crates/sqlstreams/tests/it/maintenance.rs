//! Maintenance: one at a time does it, for all streams, and what fails keeps nothing else from being done.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use sqlstreams::{CancellationToken, Client, ErrorKind, Outgoing, StepFailure};
use tokio::task::JoinHandle;

use crate::proxy::Proxy;
use crate::running::Running;
use crate::support::{client, client_at, connect, count, database, eventually, until};

type Db = tokio_postgres::Client;

/// Somebody who does the maintenance.
struct Maintainer {
    stop: CancellationToken,
    task: JoinHandle<sqlstreams::Result<()>>,
}

impl Maintainer {
    fn start(client: &Client) -> Self {
        let stop = CancellationToken::new();
        let task = tokio::spawn(client.maintenance().stop_on(stop.clone()).run());
        Self { stop, task }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

async fn failures(client: &Client) -> Vec<StepFailure> {
    client.maintenance().status().await.unwrap().failures
}

async fn partitions(db: &Db, stream: i64) -> i64 {
    let sql = format!("SELECT count(*) FROM sqlstreams.log_partition WHERE stream_id = {stream}");
    count(db, &sql).await
}

/// Whatever is put off is due.
async fn put_off_nothing(db: &Db) {
    db.batch_execute("UPDATE sqlstreams.maintenance_step SET next_due = NULL").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_at_a_time_does_it_and_is_replaced() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    assert_eq!(client.maintenance().status().await.unwrap().holder, None);
    // Somebody was killed while it had the lease.
    let sql =
        "SELECT held FROM sqlstreams.hold_maintenance(gen_random_uuid(), 'dead', '4 seconds')";
    assert!(db.query_one(sql, &[]).await.unwrap().get::<_, bool>(0));
    assert!(!client.maintenance().once().await.unwrap().held);
    let status = client.maintenance().status().await.unwrap();
    assert_eq!(status.holder.as_deref(), Some("dead"));
    assert!(status.remaining.unwrap() <= Duration::from_secs(4));

    let first = Maintainer::start(&client);
    let ours = async || {
        let status = client.maintenance().status().await.unwrap();
        status.holder.is_some_and(|holder| holder.contains(&std::process::id().to_string()))
    };
    until("it takes over", Duration::from_secs(60), ours).await;
    let holder = "SELECT hashtext(holder::text)::bigint FROM sqlstreams.maintenance ORDER BY generation DESC LIMIT 1";
    let was = count(&db, holder).await;
    // It keeps it, whoever else would like to have it.
    let second = Maintainer::start(&client);
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(count(&db, holder).await, was);
    assert!(!client.maintenance().once().await.unwrap().held);
    // It ends, and the other need not wait for the lease.
    first.stop().await;
    assert!(client.maintenance().once().await.unwrap().held, "it was given back");
    until("the other takes over", Duration::from_secs(60), ours).await;
    second.stop().await;
    assert_eq!(client.maintenance().status().await.unwrap().holder, None);
}

#[tokio::test]
async fn a_lease_in_a_future_that_never_comes_does_not_last() {
    let (client, db) = client().await;
    let sql = "UPDATE sqlstreams.maintenance SET holder = gen_random_uuid(), until = now() + interval '1 year'";
    db.batch_execute(sql).await.unwrap();
    assert!(client.maintenance().once().await.unwrap().held);
    // A restore of data only.
    db.batch_execute("DELETE FROM sqlstreams.maintenance").await.unwrap();
    client.maintenance().once().await.unwrap();
    assert!(client.maintenance().once().await.unwrap().held);
    // The row is replaced now and then: a snapshot that somebody holds keeps all versions of it.
    let sql = "SELECT count(*) FILTER (WHERE held) FROM generate_series(1, 500) AS n, LATERAL sqlstreams.hold_maintenance('00000000-0000-0000-0000-000000000001', n::text)";
    assert_eq!(count(&db, sql).await, 500);
    let sql = "SELECT max(generation) FROM sqlstreams.maintenance";
    assert!(count(&db, sql).await >= 2);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.maintenance").await, 1);
}

/// Nobody gives back, renews or takes what another holds.
#[tokio::test]
async fn only_the_holder_gives_the_lease_back() {
    let (_, db) = client().await;
    let (holder, other) = (uuid::Uuid::from_u128(1), uuid::Uuid::from_u128(2));
    let hold = "SELECT held FROM sqlstreams.hold_maintenance($1, 'name')";
    let hold = async |who| db.query_one(hold, &[&who]).await.unwrap().get::<_, bool>(0);
    let release = "SELECT sqlstreams.release_maintenance($1)";
    let release = async |who| db.query_one(release, &[&who]).await.unwrap().get::<_, bool>(0);
    assert!(hold(holder).await && !hold(other).await && hold(holder).await);
    assert!(!release(other).await);
    assert!(!hold(other).await, "it was not for the other to give back");
    assert!(release(holder).await && !release(holder).await);
    assert!(hold(other).await && !hold(holder).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_fails_does_not_keep_others_from_what_they_need() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    for name in ["a", "b", "c"] {
        client.stream::<u64>(name).partition_size(1_000).create().await.unwrap();
    }
    let draw = async |upto: i64| {
        for stream in 1..=3 {
            let sql = format!("SELECT setval('sqlstreams.message_log_{stream}_id_seq', {upto})");
            db.query(&sql, &[]).await.unwrap();
        }
        // Not as if they had been drawn in a moment.
        let sql = format!("UPDATE sqlstreams.stream_pace SET head = {upto}");
        db.batch_execute(&sql).await.unwrap();
    };
    draw(2_500).await;
    // One is broken, and of another not even the head can be read.
    let locked = connect(&url).await;
    let sql = "BEGIN; ALTER SEQUENCE sqlstreams.message_log_2_id_seq RENAME TO other";
    locked.batch_execute(sql).await.unwrap();
    let sql = "ALTER TABLE sqlstreams.message_log_1 RENAME TO elsewhere";
    db.batch_execute(sql).await.unwrap();
    assert!(client.maintenance().once().await.unwrap().held);
    assert_eq!(partitions(&db, 3).await, 6);
    let failed = failures(&client).await;
    let of = |step: &str, stream: &str| {
        failed.iter().find(|f| f.step == step && f.stream.as_deref() == Some(stream)).cloned()
    };
    let broken = of("partitions", "a").unwrap();
    assert!(broken.error.contains("message_log_1"), "{broken:?}");
    assert!(broken.next.unwrap() > broken.at, "{broken:?}");
    assert!(of("look", "b").unwrap().error.contains("lock"), "{failed:?}");
    assert!(failed.iter().all(|f| f.stream.as_deref() != Some("c")), "{failed:?}");

    // It is put off for longer and longer.
    let off = "SELECT round(extract(epoch FROM next_due - failed_at))::bigint FROM sqlstreams.maintenance_step WHERE stream_id = 1 AND step = 'partitions'";
    let mut last = 0;
    for _ in 0..3 {
        put_off_nothing(&db).await;
        client.maintenance().once().await.unwrap();
        let now = count(&db, off).await;
        assert!(now >= last * 2 && now >= 1, "{now} s after {last} s");
        last = now;
    }
    let runs = "SELECT sum(runs)::bigint FROM sqlstreams.maintenance_step WHERE stream_id = 1 AND step = 'partitions'";
    let before = count(&db, runs).await;
    client.maintenance().once().await.unwrap();
    assert_eq!(count(&db, runs).await, before, "not before its time");

    locked.batch_execute("ROLLBACK").await.unwrap();
    let sql = "ALTER TABLE sqlstreams.elsewhere RENAME TO message_log_1";
    db.batch_execute(sql).await.unwrap();
    put_off_nothing(&db).await;
    client.maintenance().once().await.unwrap();
    assert_eq!((partitions(&db, 1).await, partitions(&db, 2).await), (6, 6));
    // Whoever looks sees that it is over; how often it failed is kept.
    assert_eq!(failures(&client).await, []);
    let status = client.maintenance().status().await.unwrap();
    let step = status.steps.iter().find(|step| step.step == "partitions").unwrap();
    assert!(step.failures >= 4 && step.failing == 0, "{step:?}");
}

/// A step that cannot even be asked what it has to do.
#[tokio::test]
async fn a_step_that_fails_does_not_keep_others_from_being_done() {
    let (client, db) = client().await;
    client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    db.batch_execute(
        "SELECT setval('sqlstreams.message_log_1_id_seq', 2500);
         UPDATE sqlstreams.stream_pace SET head = 2500;
         DROP FUNCTION sqlstreams.seal_due(sqlstreams.stream_head[])",
    )
    .await
    .unwrap();
    client.maintenance().once().await.unwrap();
    assert_eq!(partitions(&db, 1).await, 6);
    let failed = failures(&client).await;
    assert_eq!((&*failed[0].step, &failed[0].stream), ("look", &None), "{failed:?}");
    assert!(failed[0].error.starts_with("seal: "), "{failed:?}");
    let sql = "CREATE FUNCTION sqlstreams.seal_due(p_heads sqlstreams.stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval) LANGUAGE sql AS 'SELECT 1, interval ''0'' WHERE false'";
    db.batch_execute(sql).await.unwrap();
    client.maintenance().once().await.unwrap();
    assert_eq!(failures(&client).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_streams_cost_a_statement_every_few_seconds_and_no_row() {
    const STREAMS: i64 = 150;
    let url = database().await;
    let (_, db) = client_at(&url).await;
    for n in 1..=STREAMS {
        db.query("SELECT sqlstreams.create_stream($1)", &[&format!("s{n}")]).await.unwrap();
        db.query("SELECT sqlstreams.create_group($1, 'g')", &[&n]).await.unwrap();
    }
    let proxy = Proxy::start(&url).await;
    let client = Client::builder(&proxy.url).migrate(false).connect().await.unwrap();
    let maintainer = Maintainer::start(&client);
    eventually(async || client.maintenance().status().await.unwrap().holder.is_some()).await;
    let sent = Arc::new(Mutex::new(BTreeMap::<String, usize>::new()));
    let log = sent.clone();
    proxy.set(move |statement| {
        *log.lock().unwrap().entry(statement.sql.to_owned()).or_default() += 1;
        None
    });
    let state =
        "SELECT count(*) + sum(hashtext(p::text || ctid::text)) FROM sqlstreams.stream_pace AS p";
    let before = count(&db, state).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let sent = sent.lock().unwrap().clone();
    println!("in 10 s for {STREAMS} streams: {sent:?}");
    assert!(sent.values().sum::<usize>() <= 5, "{sent:?}");
    assert!(sent.keys().all(|sql| sql.contains(".maintenance_look(")), "{sent:?}");
    assert_eq!(count(&db, state).await, before);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.maintenance_step").await, 0);
    maintainer.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consumers_do_it_unless_told_not_to() {
    let url = database().await;
    let (owner, db) = client_at(&url).await;
    let stream = owner.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    stream.group("g").create().await.unwrap();
    let proxy = Proxy::start(&url).await;
    let asked = Arc::new(Mutex::new(0));
    let log = asked.clone();
    proxy.set(move |statement| {
        *log.lock().unwrap() += usize::from(statement.sql.contains(".maintenance_look("));
        None
    });
    let consume = async |client: Client| {
        let stream = client.stream::<u64>("s").open().await.unwrap();
        Running::start(&stream.group("g").open().await.unwrap())
    };
    let off = Client::builder(&proxy.url).maintenance(false).connect().await.unwrap();
    let consumer = consume(off).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(*asked.lock().unwrap(), 0);
    consumer.stop().await;

    let consumer = consume(Client::connect(&proxy.url).await.unwrap()).await;
    db.query("SELECT setval('sqlstreams.message_log_1_id_seq', 2500)", &[]).await.unwrap();
    eventually(async || partitions(&db, 1).await >= 6).await;
    assert!(owner.maintenance().status().await.unwrap().holder.is_some());
    consumer.stop().await;
    // At once, unless it was in the middle of a step.
    eventually(async || owner.maintenance().status().await.unwrap().holder.is_none()).await;
}

/// A role that does not own the tables consumes, and does not take the lease from one that does. It asks once, and not again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_not_is_content() {
    let url = database().await;
    let (owner, db) = client_at(&url).await;
    let stream = owner.stream::<u64>("s").create().await.unwrap();
    stream.group("g").create().await.unwrap();
    let password = url.split(['@', ':']).nth(2).unwrap();
    db.batch_execute(&format!(
        "CREATE ROLE consumes LOGIN PASSWORD '{password}';
         GRANT USAGE ON SCHEMA sqlstreams TO consumes;
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA sqlstreams TO consumes;
         GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA sqlstreams TO consumes"
    ))
    .await
    .unwrap();
    let proxy = Proxy::start(&url).await;
    let asked = Arc::new(Mutex::new(0));
    let log = asked.clone();
    proxy.set(move |statement| {
        *log.lock().unwrap() += usize::from(statement.sql.contains(".maintenance_look("));
        None
    });
    let consumes = Client::builder(&proxy.url.replace("//postgres:", "//consumes:")).migrate(false);
    let consumes = consumes.connect().await.unwrap();
    let group = consumes.stream::<u64>("s").open().await.unwrap().group("g");
    let mut consumer = Running::start(&group.open().await.unwrap());
    eventually(async || *asked.lock().unwrap() > 0).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(*asked.lock().unwrap(), 1);
    stream.producer().send(&7).await.unwrap();
    consumer.handles(7, Duration::from_secs(30)).await;
    let error = consumes.maintenance().once().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
    assert!(error.hint().unwrap().contains("sqlstreams maintain"), "{error:?}");
    assert!(owner.maintenance().once().await.unwrap().held);
    consumer.stop().await;
}

#[tokio::test]
async fn old_keys_of_a_stream_that_nobody_sends_to_are_removed_in_chunks() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.producer().send(&1).idempotency_key("k").await.unwrap();
    let sql = "INSERT INTO sqlstreams.message_idempotency_1 SELECT n, n, n, n, now() - interval '2 days' FROM generate_series(1, 25000) AS n;
               SET statement_timeout = 0";
    db.batch_execute(sql).await.unwrap();
    let runs = Arc::new(Mutex::new(Vec::new()));
    let log = runs.clone();
    let maintenance =
        client.maintenance().on_step(move |run| log.lock().unwrap().push(run.clone()));
    maintenance.once().await.unwrap();
    let runs: Vec<_> = std::mem::take(&mut *runs.lock().unwrap());
    assert!(runs.iter().any(|run| run.step == "keys" && run.error.is_none()), "{runs:?}");
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_idempotency_1").await, 1);
    let off = "SELECT round(extract(epoch FROM next_due - started_at) / 60)::bigint FROM sqlstreams.maintenance_step WHERE step = 'keys'";
    assert_eq!(count(&db, off).await, 60, "the other is due in a day; the window may change");
    let again = client.maintenance().once().await.unwrap();
    assert_eq!(again.steps, 0);
}

#[tokio::test]
async fn compacted_streams_are_compacted_and_their_space_comes_back() {
    let (client, db) = client().await;
    let stream = client.stream::<String>("s").compacted(true).partition_size(10_000);
    stream.create().await.unwrap();
    let fill = "INSERT INTO sqlstreams.message_log_1 (key, payload, produced_at)
         SELECT 'k' || n % 100, to_json(repeat(md5(n::text), 10)), now() - interval '1 hour' FROM generate_series(1, 12000) AS n";
    db.batch_execute(fill).await.unwrap();
    let messages = "SELECT count(*) FROM sqlstreams.message_log_1";
    client.maintenance().once().await.unwrap();
    assert_eq!(count(&db, messages).await, 12_000, "it is new");
    let sql = "UPDATE sqlstreams.stream SET created_at = now() - interval '1 day'";
    db.batch_execute(sql).await.unwrap();
    let size = "SELECT pg_table_size('sqlstreams.message_log_1_p0')";
    let before = count(&db, size).await;
    // A transaction that writes, be it in another database, keeps the space until it ends: that uses no tries up here.
    let again = "UPDATE sqlstreams.maintenance_step SET next_due = NULL, memory = memory - 'tries'";
    until("the space is back", Duration::from_secs(90), async || {
        db.batch_execute(again).await.unwrap();
        client.maintenance().once().await.unwrap();
        count(&db, messages).await == 100 && count(&db, size).await < before / 2
    })
    .await;
    // And not again before something comes.
    let runs = "SELECT runs FROM sqlstreams.maintenance_step WHERE step = 'compact'";
    let before = count(&db, runs).await;
    put_off_nothing(&db).await;
    client.maintenance().once().await.unwrap();
    assert_eq!(count(&db, runs).await, before);
}

/// The steps beside each other, as when a holder that was frozen goes on, and beside what they are for.
#[tokio::test(flavor = "multi_thread")]
async fn tb_103_ten_at_once_do_not_get_into_a_deadlock() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    stream.group("g").create().await.unwrap();
    let producer = stream.producer();
    let stop = CancellationToken::new();
    let sending = tokio::spawn({
        let stop = stop.clone();
        async move {
            let mut n = 0_u64;
            while !stop.is_cancelled() {
                let keys: Vec<String> = (0..400).map(|k| format!("{}", n + k)).collect();
                let batch = keys.iter().map(|k| Outgoing::new(&1).idempotency_key(k));
                producer.send_all(batch).await.unwrap();
                n += 400;
            }
            n
        }
    });
    let rounds = join_all((0..10_i32).map(|i| {
        let url = url.clone();
        async move {
            let db = connect(&url).await;
            let steps = [
                "SELECT sqlstreams.maintain_partitions(1)",
                "SELECT sqlstreams.seal_partitions(1)",
                "UPDATE sqlstreams.message_idempotency_1 SET sent_at = now() - interval '2 days' WHERE ctid IN (SELECT ctid FROM sqlstreams.message_idempotency_1 LIMIT 100 FOR UPDATE SKIP LOCKED)",
                "SELECT sqlstreams.expire_idempotency_keys(1)",
                "SELECT sqlstreams.maintenance_look(gen_random_uuid())",
                "SELECT sqlstreams.record_step('seal', 1, now())",
                "SELECT sqlstreams.release_maintenance(holder) FROM sqlstreams.maintenance",
            ];
            for round in 0..60 {
                let sql = steps[(round + i as usize) % steps.len()];
                db.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
            }
        }
    }));
    rounds.await;
    stop.cancel();
    let sent = sending.await.unwrap();
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, sent as i64);
    let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    db.batch_execute("SELECT pg_stat_clear_snapshot()").await.unwrap();
    assert_eq!(count(&db, sql).await, 0);
}
