//! Consumers that read what they claim straight from the log: it is done where it may be, and nothing is ever missing in what
//! they read. Functions of the server are wrapped in others that count, and that can be held up, so that things happen between
//! a claim and the reading.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{
    Bytes, CancellationToken, Client, Consumed, Delivery, Group, GroupBuilder, Outgoing,
    PayloadType, RetryPolicy, Start, Stream, StreamBuilder,
};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_postgres::Client as Db;

use crate::retention::hour;
use crate::support::{client_at, connect, count, database, eventually, numbers};

/// Of each message how often it came.
type Counts = Arc<Mutex<BTreeMap<u64, u32>>>;

/// What a consumer's window is at least, in ids.
const WINDOW: i64 = 10_000;

/// Counts in sequences, which no rollback takes back, and waits for whoever holds the lock 7.
const SPIES: &str = r#"
    CREATE SEQUENCE sqlstreams.fetches MINVALUE 0;
    CREATE SEQUENCE sqlstreams.straights MINVALUE 0;
    ALTER FUNCTION sqlstreams."fetch" RENAME TO fetch_itself;
    ALTER FUNCTION sqlstreams.claimed_range RENAME TO claimed_range_itself;
    CREATE FUNCTION sqlstreams."fetch"(p_stream bigint, p_group bigint, p_token uuid, p_after bigint, p_limit bigint, p_bytes bigint, p_type anyelement)
    RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, more boolean, payload anyelement, remaining interval, lane smallint)
    LANGUAGE plpgsql VOLATILE AS $$
    BEGIN
        PERFORM nextval('sqlstreams.fetches');
        RETURN QUERY SELECT * FROM sqlstreams.fetch_itself(p_stream, p_group, p_token, p_after, p_limit, p_bytes, p_type);
    END $$;
    CREATE FUNCTION sqlstreams.claimed_range(p_stream bigint, p_group bigint, p_token uuid, p_from bigint, OUT first bigint, OUT last bigint)
    LANGUAGE plpgsql VOLATILE AS $$
    BEGIN
        IF EXISTS (SELECT FROM sqlstreams.consumer_lease_1 WHERE token = p_token) THEN
            PERFORM pg_advisory_xact_lock_shared(7);
        END IF;
        SELECT r.first, r.last INTO first, last FROM sqlstreams.claimed_range_itself(p_stream, p_group, p_token, p_from) AS r;
        IF first IS NOT NULL THEN
            PERFORM nextval('sqlstreams.straights');
        END IF;
    END $$;
"#;

/// How often messages were read by the function, and how often straight from the log.
async fn reads(db: &Db) -> (i64, i64) {
    let sql = "SELECT (SELECT last_value + is_called::int FROM sqlstreams.fetches), (SELECT last_value + is_called::int FROM sqlstreams.straights)";
    let row = db.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

fn counting(counts: &Counts) -> impl Fn(Delivery<u64>) -> std::future::Ready<()> + use<> {
    let counts = counts.clone();
    move |message| {
        *counts.lock().unwrap().entry(message.payload).or_default() += 1;
        std::future::ready(())
    }
}

/// Each of these came once, and nothing else.
#[track_caller]
fn assert_once(counts: &Counts, expected: impl IntoIterator<Item = u64>) {
    let counts = counts.lock().unwrap();
    let wrong: Vec<_> = counts.iter().filter(|(_, times)| **times != 1).take(10).collect();
    assert!(wrong.is_empty(), "not once: {wrong:?}");
    let expected: BTreeSet<u64> = expected.into_iter().collect();
    let came: BTreeSet<u64> = counts.keys().copied().collect();
    let missing: Vec<_> = expected.difference(&came).take(10).collect();
    let surplus: Vec<_> = came.difference(&expected).take(10).collect();
    assert!(came == expected, "missing: {missing:?}, came for no reason: {surplus:?}");
}

async fn produce(stream: &Stream<u64>, payloads: Range<u64>) {
    let payloads: Vec<u64> = payloads.collect();
    stream.producer().send_all(payloads.iter().map(Outgoing::new)).await.unwrap();
}

/// A consumer whose first message has come, so that it knows where the next one will be. It takes messages as it is allowed to.
struct Held {
    db: Db,
    url: String,
    stream: Stream<u64>,
    group: Group<u64>,
    counts: Counts,
    allowed: Arc<Semaphore>,
    stop: CancellationToken,
    running: JoinHandle<sqlstreams::Result<Consumed>>,
}

impl Held {
    /// With so many handlers, of a group that `settings` makes, in a stream that `shape` makes.
    async fn start(
        handlers: usize,
        shape: impl FnOnce(StreamBuilder<u64>) -> StreamBuilder<u64>,
        settings: impl FnOnce(GroupBuilder<u64>) -> GroupBuilder<u64>,
    ) -> Self {
        let url = database().await;
        let client = Client::builder(&url).maintenance(false).connect().await.unwrap();
        let db = connect(&url).await;
        let stream = shape(client.stream::<u64>("s")).create().await.unwrap();
        produce(&stream, 0..1).await;
        let group = settings(stream.group("g")).create().await.unwrap();
        db.batch_execute(SPIES).await.unwrap();
        let (counts, allowed) = (Counts::default(), Arc::new(Semaphore::new(1)));
        let stop = CancellationToken::new();
        let consumer = group.consumer().concurrency(handlers).stop_on(stop.clone());
        let running = tokio::spawn(consumer.run({
            let (counts, allowed) = (counts.clone(), allowed.clone());
            move |message: Delivery<u64>| {
                let (counts, allowed) = (counts.clone(), allowed.clone());
                async move {
                    allowed.acquire().await.unwrap().forget();
                    *counts.lock().unwrap().entry(message.payload).or_default() += 1;
                }
            }
        }));
        eventually(async || counts.lock().unwrap().len() == 1).await;
        let held = Self { db, url, stream, group, counts, allowed, stop, running };
        eventually(async || held.leases().await == 0).await;
        assert_eq!(reads(&held.db).await.1, 0);
        held
    }

    async fn leases(&self) -> i64 {
        count(&self.db, "SELECT count(*) FROM sqlstreams.consumer_lease_1").await
    }

    /// Holds whoever is about to read up, once it has claimed and until the lock is let go.
    async fn gate(&self) -> Db {
        let gate = connect(&self.url).await;
        gate.batch_execute("SELECT pg_advisory_lock(7)").await.unwrap();
        gate
    }

    async fn until_somebody_waits(&self) {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted
                   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        eventually(async || count(&self.db, sql).await > 0).await;
    }

    /// Handles everything.
    async fn finish(&self) {
        self.allowed.add_permits(100_000);
        let sql = "SELECT sqlstreams.is_resolved(1, 1, sqlstreams.stream_head(1))::int::bigint";
        eventually(async || count(&self.db, sql).await == 1).await;
    }

    /// The same, and these have come once, and nothing else.
    async fn ends_with(self, expected: impl IntoIterator<Item = u64>) {
        self.finish().await;
        self.stop.cancel();
        self.running.await.unwrap().unwrap();
        assert_once(&self.counts, expected);
    }
}

/// All but the first messages, of which nothing was known, come straight from the log, and each of them once.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_claimed_is_read_straight_from_the_log() {
    for settings in [
        "jit = on",
        "default_transaction_isolation = 'serializable'",
        "plan_cache_mode = force_generic_plan",
    ] {
        let url = database().await;
        let name = url.rsplit('/').next().unwrap();
        let alter = format!("ALTER DATABASE {name} SET {settings}");
        connect(&url).await.batch_execute(&alter).await.unwrap();
        let (client, db) = client_at(&url).await;
        let stream = numbers(&client, "s", 20_000).await;
        db.batch_execute(SPIES).await.unwrap();
        let (group, counts) = (stream.group("g"), Counts::default());
        let consumed = group.consumer().concurrency(4).until_caught_up().run(counting(&counts));
        assert_eq!(consumed.await.unwrap().handled, 20_000);
        assert_once(&counts, 0..20_000);
        let (fetches, straights) = reads(&db).await;
        assert_eq!(fetches, 1, "{settings}");
        assert!(straights > 1, "{settings}");
    }
}

/// Whatever a message carries is the same, whichever way it is read.
#[tokio::test(flavor = "multi_thread")]
async fn what_comes_straight_is_what_was_sent() {
    for kind in [PayloadType::Json, PayloadType::Jsonb, PayloadType::Text, PayloadType::Bytea] {
        let url = database().await;
        let client = Client::builder(&url).maintenance(false).connect().await.unwrap();
        let db = connect(&url).await;
        let stream = client.stream::<Vec<u8>>("s").codec::<Bytes>().payload_type(kind);
        let stream = stream.compacted(true).create().await.unwrap();
        let text = |n: u64| match n % 3 {
            0 => format!(r#"{{"n": {n}, "text": "ä\\u20ac \" {n}"}}"#),
            1 => n.to_string(),
            // Beside the row.
            _ => format!(r#"["{}"]"#, format!("{n} ").repeat(5_000)),
        };
        let payloads: Vec<Vec<u8>> = (0..300).map(|n| text(n).into_bytes()).collect();
        let headers = |n: usize| {
            let value = serde_json::json!({ "n": n, "ü": [null, "x"] });
            value.as_object().unwrap().clone()
        };
        let batch = payloads.iter().enumerate().map(|(n, payload)| {
            let key = format!("k{n}");
            let message = match n % 7 {
                3 => Outgoing::tombstone(key),
                _ => Outgoing::new(payload).key(key),
            };
            let message = if n % 2 == 0 { message.headers(headers(n)) } else { message };
            let message = if n % 5 == 0 { message.routing_key("a.b") } else { message };
            match n % 11 {
                4 => message.expires_in(Duration::from_secs(3600)),
                5 => message.expires_in(Duration::ZERO),
                _ => message,
            }
        });
        stream.producer().send_all(batch).await.unwrap();
        db.batch_execute(SPIES).await.unwrap();
        let seen = Arc::new(Mutex::new(BTreeMap::new()));
        let consumer = stream.group("g").consumer().concurrency(4).until_caught_up();
        let consumed = consumer.run({
            let seen = seen.clone();
            move |message: Delivery<Vec<u8>>| {
                let expires = message.context.expires().is_some();
                let before = seen.lock().unwrap().insert(message.id, (message.message, expires));
                assert!(before.is_none());
                std::future::ready(())
            }
        });
        let consumed = consumed.await.unwrap();
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert_eq!((seen.len(), consumed.expired), (273, 27), "{kind}");
        let ids: Vec<i64> = (1..=300).filter(|id| (id - 1) % 11 != 5).collect();
        let stored = stream.read(&ids).await.unwrap();
        assert_eq!(stored.len(), 273);
        for message in stored {
            let n = message.id - 1;
            let (got, expires) = &seen[&message.id];
            assert_eq!(got, &message, "{kind}");
            assert_eq!((got.tombstone, *expires), (n % 7 == 3, n % 11 == 4));
            assert_eq!(got.headers.is_empty(), n % 2 == 1);
        }
        let (fetches, straights) = reads(&db).await;
        assert_eq!(fetches, 1);
        assert!(straights > 0, "{kind}");
    }
}

/// Where messages are larger than was thought the reading stops on the way, and goes on behind.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_much_at_once_comes_in_pieces() {
    let (client, db) = client_at(&database().await).await;
    let stream = client.stream::<Vec<u8>>("s").codec::<Bytes>().create().await.unwrap();
    let large = |n: u8| vec![n; if n == 0 { 1 } else { 1 << 20 }];
    stream.producer().send(&large(0)).await.unwrap();
    db.batch_execute(SPIES).await.unwrap();
    let stop = CancellationToken::new();
    let counts = Counts::default();
    let consumer = stream.group("g").consumer().concurrency(64).stop_on(stop.clone());
    let running = tokio::spawn(consumer.run({
        let counts = counts.clone();
        move |message: Delivery<Vec<u8>>| {
            *counts.lock().unwrap().entry(u64::from(message.payload[0])).or_default() += 1;
            assert!(message.payload.iter().all(|byte| *byte == message.payload[0]));
            std::future::ready(())
        }
    }));
    eventually(async || counts.lock().unwrap().len() == 1).await;
    for round in 0..3_u8 {
        let payloads: Vec<Vec<u8>> = (1..=60).map(|n| large(round * 60 + n)).collect();
        stream.producer().send_all(payloads.iter().map(Outgoing::new)).await.unwrap();
        eventually(async || counts.lock().unwrap().len() == 1 + 60 * usize::from(round + 1)).await;
    }
    let sql = "SELECT count(*) FROM sqlstreams.consumer_lease_1";
    eventually(async || count(&db, sql).await == 0).await;
    stop.cancel();
    assert_eq!(running.await.unwrap().unwrap().handled, 181);
    assert_once(&counts, 0..181);
    let (fetches, straights) = reads(&db).await;
    assert_eq!(fetches, 1);
    // 180 MB, of which about 16 come at once at the most.
    assert!(straights > 3, "{straights}");
}

/// Others have claimed most of the ids among which the next claim was expected: what lies beyond was not looked at, and is
/// fetched.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_across_the_end_of_the_window_is_fetched() {
    for (others, fetches) in [(WINDOW - 20, 1), (WINDOW - 4, 2), (WINDOW + 50, 2)] {
        let held = Held::start(16, |stream| stream, |group| group).await;
        // All of it is there at once, and most of that is somebody else's.
        let other = format!(
            "BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) SELECT to_json(n) FROM generate_series(1, {others} + 8) AS n;
             SELECT sqlstreams.settle(1, 1, a.seq, a.token, '{{(,)}}') FROM sqlstreams.advance(1, 1, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', {others}) AS a;
             COMMIT"
        );
        held.db.batch_execute(&other).await.unwrap();
        held.finish().await;
        assert_eq!(reads(&held.db).await.0, fetches, "{others}");
        let mine = others as u64 + 1..=others as u64 + 8;
        held.ends_with(std::iter::once(0).chain(mine)).await;
    }
}

/// What happens between a claim and its reading, while the reader's snapshot is taken already.
#[tokio::test(flavor = "multi_thread")]
async fn what_happens_after_the_claim_is_seen_before_the_reading_counts() {
    let (all, first) = ((0..11).collect::<Vec<u64>>(), vec![0]);
    let cases = [
        // It is still for the group, all of it.
        ("SELECT sqlstreams.set_bindings(1, 1, '[\"never.*\"]')", all.clone(), false),
        // Somebody else has them.
        ("SELECT sqlstreams.expire_leases()", first, false),
        ("SELECT", all, true),
    ];
    for (between, expected, straight) in cases {
        let held = Held::start(16, |stream| stream, |group| group).await;
        // As if they had run out, and somebody had been quick.
        let helper = "CREATE FUNCTION sqlstreams.expire_leases() RETURNS void LANGUAGE plpgsql AS $$
            DECLARE a record;
            BEGIN
                UPDATE sqlstreams.consumer_lease_1 SET expires_at = '-infinity';
                SELECT * INTO a FROM sqlstreams.advance(1, 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 1000);
                PERFORM sqlstreams.settle(1, 1, a.seq, a.token, '{(,)}');
            END $$";
        held.db.batch_execute(helper).await.unwrap();
        let gate = held.gate().await;
        produce(&held.stream, 1..11).await;
        held.until_somebody_waits().await;
        held.db.batch_execute(between).await.expect(between);
        gate.batch_execute("SELECT pg_advisory_unlock(7)").await.unwrap();
        held.finish().await;
        assert_eq!(reads(&held.db).await.1, i64::from(straight), "{between}");
        held.ends_with(expected).await;
    }
}

/// A group that is moved back between its claim and the reading gets all of it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_may_be_moved_between_its_claim_and_the_reading() {
    let held = Held::start(16, |stream| stream, |group| group).await;
    let gate = held.gate().await;
    produce(&held.stream, 1..11).await;
    held.until_somebody_waits().await;
    held.group.seek(Start::Beginning).run().await.unwrap();
    gate.batch_execute("SELECT pg_advisory_unlock(7)").await.unwrap();
    held.finish().await;
    assert_eq!(held.counts.lock().unwrap().insert(0, 1), Some(2));
    held.ends_with(0..11).await;
}

/// The partition of what was claimed is let go before it is read: it comes from the archive.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_may_leave_between_a_claim_and_the_reading() {
    let shape = |stream: StreamBuilder<u64>| {
        stream.partition_size(1_000).retention(hour().drop_unread(true))
    };
    let held = Held::start(16, shape, |group| group).await;
    let gate = held.gate().await;
    produce(&held.stream, 1..1_500).await;
    held.until_somebody_waits().await;
    let seal = "SELECT more::int::bigint FROM sqlstreams.seal_partitions(1)";
    eventually(async || count(&held.db, seal).await == 0).await;
    let age = "UPDATE sqlstreams.log_partition SET sealed_at = sealed_at - interval '1 day'";
    held.db.batch_execute(age).await.unwrap();
    held.stream.retain().await.unwrap();
    let archived = count(&held.db, "SELECT count(*) FROM sqlstreams.message_archive_1").await;
    gate.batch_execute("SELECT pg_advisory_unlock(7)").await.unwrap();
    held.finish().await;
    let (fetches, _) = reads(&held.db).await;
    assert!(fetches > 1);
    assert!((1..100).contains(&archived), "{archived}");
    // Message n has id n + 1; partition 0 ends with id 999.
    let expected = (0..=archived as u64).chain(999..1_500);
    held.ends_with(expected).await;
}

/// Of a fair group it is not tried.
#[tokio::test(flavor = "multi_thread")]
async fn fair_groups_fetch() {
    let held = Held::start(4, |stream| stream, |group| group.fair()).await;
    produce(&held.stream, 1..2_000).await;
    held.finish().await;
    assert_eq!(reads(&held.db).await.1, 0);
    held.ends_with(0..2_000).await;
}

/// Messages that the server cannot hand out are told of, and no other is lost with them.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_is_a_dead_letter() {
    let held = Held::start(16, |stream| stream, |group| group).await;
    // Nothing that is stored beside its row can be read any more.
    let numbers = "INSERT INTO sqlstreams.message_log_1 (headers, payload)
        SELECT CASE WHEN n % 4 = 0 THEN jsonb_build_object('h', (SELECT string_agg(md5(n::text || i), '') FROM generate_series(1, 500) AS i)) END, to_json(n) FROM generate_series(1, 12) AS n";
    let damage = "DELETE FROM pg_class WHERE oid = (SELECT reltoastrelid FROM pg_class WHERE oid = 'sqlstreams.message_log_1_p0'::regclass)";
    held.db.batch_execute(&format!("BEGIN; {numbers}; {damage}; COMMIT")).await.unwrap();
    held.finish().await;
    let dead = held.group.dead_letters(0, 100);
    let ids: Vec<i64> = dead.await.unwrap().iter().map(|dead| dead.message_id).collect();
    assert_eq!(ids, [5, 9, 13]);
    held.ends_with((0..13).filter(|n| *n == 0 || n % 4 != 0)).await;
}

/// Several consumers, producers that roll back, small partitions, failures: each message is handled once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_missing_where_many_consume() {
    const MESSAGES: u64 = 12_000;
    let (client, db) = client_at(&database().await).await;
    let stream = client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    db.batch_execute("SELECT sqlstreams.ensure_partitions(1, 30)").await.unwrap();
    let policy = RetryPolicy::attempts(3).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    let group = stream.group("g").retry(policy).create().await.unwrap();
    db.batch_execute(SPIES).await.unwrap();
    let (counts, stop) = (Counts::default(), CancellationToken::new());
    let consumers: Vec<_> = (0..3)
        .map(|_| {
            let consumer = group.consumer().concurrency(8).stop_on(stop.clone());
            let counts = counts.clone();
            tokio::spawn(consumer.run(move |message: Delivery<u64>| {
                let fails = message.payload.is_multiple_of(50) && message.attempt() == 1;
                if !fails {
                    *counts.lock().unwrap().entry(message.payload).or_default() += 1;
                }
                std::future::ready(if fails { Err("once") } else { Ok(()) })
            }))
        })
        .collect();
    let mut random = fastrand::Rng::with_seed(1);
    let mut made = 0;
    while made < MESSAGES {
        let upto = (made + random.u64(1..400)).min(MESSAGES);
        produce(&stream, made..upto).await;
        made = upto;
        let lost = format!(
            "BEGIN; INSERT INTO sqlstreams.message_log_1 (payload) SELECT '0' FROM generate_series(1, {}); ROLLBACK",
            random.u64(1..20)
        );
        db.batch_execute(&lost).await.unwrap();
    }
    let sql = "SELECT sqlstreams.is_resolved(1, 1, sqlstreams.stream_head(1))::int::bigint";
    eventually(async || count(&db, sql).await == 1).await;
    stop.cancel();
    for consumer in consumers {
        consumer.await.unwrap().unwrap();
    }
    assert_once(&counts, 0..MESSAGES);
    let (fetches, straights) = reads(&db).await;
    println!("{fetches} fetches, {straights} times straight");
    assert!(straights > 0);
}
