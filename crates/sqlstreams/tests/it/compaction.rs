//! Compaction: what it removes, and what it must not.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlstreams::{Delivery, Group, Outgoing, RetryPolicy, Stream};

use crate::plain::{Plain, create_group};
use crate::support::{client, client_at, connect, count, database, eventually, until};

const NOTHING: Duration = Duration::ZERO;

/// A step with no regard for age, over all that was sent: what it removed.
async fn compact(db: &tokio_postgres::Client) -> i64 {
    // Looks at the lock table are rationed.
    let is_final = "SELECT (look_at_gap(1, settled_id(1)) >= stream_head(1))::int::bigint";
    db.batch_execute("SET search_path = sqlstreams, public").await.unwrap();
    eventually(async || count(db, is_final).await == 1).await;
    step(db).await
}

/// The same as far as the log is known to be final.
async fn step(db: &tokio_postgres::Client) -> i64 {
    count(db, "SELECT removed FROM sqlstreams.compact(1, 0, 10000, '0', '0')").await
}

async fn ids(db: &tokio_postgres::Client) -> Vec<i64> {
    let sql = "SELECT id FROM sqlstreams.message_log_1 ORDER BY id";
    db.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// Stream 1 with one message for each of these keys; those that end in `-` are tombstones.
async fn with_keys(url: &str, keys: &[&str]) -> (Stream<Option<u64>>, tokio_postgres::Client) {
    let (client, db) = client_at(url).await;
    let stream = client.stream("s").compacted(true).partition_size(1_000).create().await.unwrap();
    send(&stream, keys).await;
    (stream, db)
}

async fn send(stream: &Stream<Option<u64>>, keys: &[&str]) {
    let messages = keys.iter().map(|key| match key.strip_suffix('-') {
        Some(key) => Outgoing::tombstone(key),
        None => Outgoing::new(&Some(7)).key(*key),
    });
    stream.producer().send_all(messages).await.unwrap();
}

#[tokio::test]
async fn what_is_superseded_goes_and_the_newest_stays() {
    let url = database().await;
    let (stream, db) = with_keys(&url, &["a", "b", "a", "c", "b", "c-", "a"]).await;
    // Too young; then old enough, but for the tombstone.
    let young = stream.compact(Duration::from_secs(300), NOTHING).await.unwrap();
    assert_eq!((young.looked_at, young.removed, young.floor, young.busy), (7, 0, 7, false));
    let done = stream.compact(NOTHING, Duration::from_secs(3600)).await.unwrap();
    assert_eq!((done.looked_at, done.removed), (7, 4));
    assert_eq!(ids(&db).await, [5, 6, 7]);
    assert_eq!(stream.compact(NOTHING, NOTHING).await.unwrap().removed, 1);
    assert_eq!(ids(&db).await, [5, 7]);
    // What has expired ends like a tombstone.
    let soon = stream.producer();
    soon.send(&Some(1)).key("b").expires_in(Duration::from_millis(1)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(compact(&db).await, 1);
    assert!(stream.latest("b").await.unwrap().is_none());
    assert_eq!(compact(&db).await, 1);
    assert_eq!(ids(&db).await, [7]);
    // Keys whose every message is gone may come back.
    send(&stream, &["c"]).await;
    assert_eq!(stream.latest("c").await.unwrap().unwrap().id, 9);
}

#[tokio::test]
async fn a_tombstone_stays_while_an_older_message_of_its_key_does() {
    let url = database().await;
    let (stream, db) = with_keys(&url, &["a", "a-"]).await;
    // The old one is in a group's exception queue, as a dead letter.
    let group = create_group(&db, 1, "g").await;
    let plain = Plain { db: connect(&url).await, stream: 1, group };
    let lease = plain.claim(10).await.unwrap();
    assert_eq!(compact(&db).await, 0, "pending");
    plain.fail(&lease, &[(1, "dead", None)]).await;
    plain.settle(&lease, "{[2,3)}").await;
    for _ in 0..3 {
        assert_eq!(compact(&db).await, 0, "a dead letter");
    }
    assert!(stream.latest("a").await.unwrap().is_none());
    assert_eq!(plain.discard(&[1]).await, [1]);
    // Not both at once: the step sees the older one still.
    assert_eq!(compact(&db).await, 1);
    assert_eq!(ids(&db).await, [2]);
    assert!(stream.latest("a").await.unwrap().is_none());
    assert_eq!(compact(&db).await, 1);
}

#[tokio::test]
async fn nothing_goes_that_a_group_has_not_resolved() {
    let url = database().await;
    let (_stream, db) = with_keys(&url, &["a"; 20]).await;
    let fast = Plain { db: connect(&url).await, stream: 1, group: create_group(&db, 1, "f").await };
    let slow = Plain { db: connect(&url).await, stream: 1, group: create_group(&db, 1, "s").await };
    assert_eq!(compact(&db).await, 0, "nothing is claimed");
    let all = fast.claim(20).await.unwrap();
    fast.settle(&all, "{[1,21)}").await;
    assert_eq!(compact(&db).await, 0, "one has claimed nothing");
    // 1 to 5 handed out, 1 and 2 done, 4 fails; 6 to 10 done.
    let first = slow.claim(5).await.unwrap();
    let second = slow.claim(5).await.unwrap();
    slow.settle(&second, "{[6,11)}").await;
    assert_eq!(compact(&db).await, 0);
    slow.settle(&first, "{[1,3)}").await;
    assert_eq!(compact(&db).await, 2);
    slow.fail(&first, &[(4, "retry", Some(0.0))]).await;
    assert_eq!(compact(&db).await, 0, "3 is pending");
    slow.settle(&first, "{[3,4)}").await;
    slow.settle(&first, "{[5,6)}").await;
    // One message that fails holds up itself alone.
    compact(&db).await;
    assert_eq!(ids(&db).await, [vec![4], (11..=20).collect()].concat());
    let (token, due) = slow.claim_exceptions(10, false).await;
    assert_eq!(due, [4]);
    assert_eq!(compact(&db).await, 0);
    slow.settle_exceptions(token, &[(4, "ok", None)]).await;
    assert_eq!(compact(&db).await, 1);
    // A group that was dropped holds up nothing.
    db.query("SELECT sqlstreams.drop_group(1, $1)", &[&slow.group]).await.unwrap();
    assert_eq!(compact(&db).await, 9);
    assert_eq!(ids(&db).await, [20]);
}

#[tokio::test]
async fn what_commits_late_is_waited_for() {
    let url = database().await;
    let (stream, db) = with_keys(&url, &["x"]).await;
    let late = connect(&url).await;
    let insert = "BEGIN; INSERT INTO sqlstreams.message_log_1 (key, payload) VALUES ('a', '1')";
    late.batch_execute(insert).await.unwrap();
    send(&stream, &["a-", "x"]).await;
    for _ in 0..3 {
        assert_eq!(step(&db).await, 0, "nothing is final while somebody writes");
    }
    late.batch_execute("COMMIT").await.unwrap();
    assert!(stream.latest("a").await.unwrap().is_none());
    until("all of it is removed", Duration::from_secs(20), async || {
        step(&db).await;
        ids(&db).await == [4]
    })
    .await;
}

#[tokio::test]
async fn it_locks_the_partition_alone_and_keeps_out_of_anothers_way() {
    let url = database().await;
    let (stream, db) = with_keys(&url, &["a", "a"]).await;
    let locks = "SELECT string_agg(relation::regclass::text, ',') FROM pg_locks
                 WHERE pid = pg_backend_pid() AND mode = 'RowExclusiveLock' AND relation::regclass::text LIKE '%message_log%'";
    db.batch_execute("BEGIN").await.unwrap();
    assert_eq!(compact(&db).await, 1);
    let locked: String = db.query_one(locks, &[]).await.unwrap().get(0);
    assert!(locked.split(',').all(|name| name.contains("message_log_1_p0")), "{locked}");
    // Somebody else is not held up, and neither are messages.
    let other = stream.compact(NOTHING, NOTHING).await.unwrap();
    assert_eq!((other.busy, other.removed), (true, 0));
    send(&stream, &["a"]).await;
    db.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(stream.compact(NOTHING, NOTHING).await.unwrap().removed, 2);
    // By hand messages are deleted from a partition, and never written to it.
    let write = "INSERT INTO sqlstreams.message_log_1_p0 OVERRIDING SYSTEM VALUE VALUES (9, 'k')";
    assert_eq!(db.execute(write, &[]).await.unwrap_err().code().unwrap().code(), "SQ007");
}

/// It would be handed messages that are about to go, and have dead letters without a message.
#[tokio::test]
async fn no_group_is_created_while_a_step_is_under_way() {
    let url = database().await;
    let (stream, db) = with_keys(&url, &["a", "a"]).await;
    let other = connect(&url).await;
    other.batch_execute("BEGIN").await.unwrap();
    assert_eq!(compact(&other).await, 1);
    let mut created = Box::pin(stream.group("g").create());
    let early = tokio::time::timeout(Duration::from_millis(300), &mut created).await;
    assert!(early.is_err(), "{early:?}");
    other.batch_execute("COMMIT").await.unwrap();
    created.await.unwrap();
    // Nor the other way round.
    db.batch_execute("BEGIN; SELECT sqlstreams.create_group(1, 'h')").await.unwrap();
    assert!(stream.compact(NOTHING, NOTHING).await.unwrap().busy);
    db.batch_execute("COMMIT").await.unwrap();
    assert!(!stream.compact(NOTHING, NOTHING).await.unwrap().busy);
}

#[tokio::test]
async fn it_goes_in_steps_through_all_partitions() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").compacted(true).partition_size(1_000);
    let stream = stream.create().await.unwrap();
    let insert = "INSERT INTO sqlstreams.message_log_1 (key, payload) SELECT 'k' || n % 100, '1' FROM generate_series(1, 3500) AS n";
    db.batch_execute(insert).await.unwrap();
    let step =
        "SELECT looked_at, removed, upto, floor FROM sqlstreams.compact(1, $1, 700, '0', '0')";
    let (mut upto, mut steps, mut removed) = (0_i64, 0, 0);
    loop {
        let row = db.query_one(step, &[&upto]).await.unwrap();
        assert!(row.get::<_, i64>(0) <= 700 && row.get::<_, i64>(2) > upto);
        (upto, steps, removed) = (row.get(2), steps + 1, removed + row.get::<_, i64>(1));
        if upto == row.get::<_, i64>(3) {
            break;
        }
    }
    assert_eq!((upto, steps, removed), (3500, 7, 3400));
    assert_eq!(stream.compact(NOTHING, NOTHING).await.unwrap().looked_at, 100);
    let plain = client.stream::<u64>("plain").create().await.unwrap();
    assert_eq!(plain.compact(NOTHING, NOTHING).await.unwrap_err().code(), "invalid_argument");
}

/// What the groups of the test below were handed, by group: each key's ids.
type Seen = Arc<Mutex<HashMap<String, BTreeMap<String, BTreeSet<i64>>>>>;

/// A consumer that fails now and then.
fn consume(group: &Group<Option<u64>>, seen: &Seen) -> tokio::task::JoinHandle<()> {
    let (seen, name) = (seen.clone(), group.name().to_owned());
    let handler = move |message: Delivery<Option<u64>>| {
        let failed = fastrand::u32(0..10) == 0;
        if !failed {
            let mut seen = seen.lock().unwrap();
            let keys = seen.entry(name.clone()).or_default();
            keys.entry(message.key.clone().unwrap()).or_default().insert(message.id);
        }
        std::future::ready(match (failed, message.id % 97) {
            (_, 0) => Err("always"),
            (true, _) => Err("now and then"),
            _ => Ok(()),
        })
    };
    let consumer = group.consumer().concurrency(4);
    tokio::spawn(async move { drop(consumer.run(handler).await) })
}

/// Sends, tombstones, roll-backs, late commits, consumers that die, groups that lag or come later, and any number of compactions
/// all the while. `latest` is what a model says; every group is handed every message that was there before it was compacted.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_happens_the_newest_are_there_and_nothing_unresolved_vanishes() {
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(fastrand::u64(..));
    println!("SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let url = database().await;
    let (stream, db) = with_keys(&url, &[]).await;
    let retry =
        RetryPolicy::attempts(4).backoff(Duration::from_millis(5), 1.0, Duration::from_millis(5));
    let lease = Duration::from_millis(400);
    let mut groups = Vec::new();
    for name in ["parallel", "ordered", "lagging"] {
        let group = stream.group(name).lease(lease).retry(retry);
        let group = if name == "ordered" { group.ordered() } else { group };
        groups.push(group.create().await.unwrap());
    }
    let seen = Seen::default();
    let stop = Arc::new(AtomicBool::new(false));
    let mut compactors = Vec::new();
    for n in 0..2_u64 {
        let (db, stop, seed) = (connect(&url).await, stop.clone(), seed ^ n);
        compactors.push(tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut upto, mut removed) = (0_i64, 0);
            while !stop.load(Ordering::Relaxed) {
                // Some are cut short, and their work is undone.
                let undone = random.u32(0..4) == 0;
                db.batch_execute("BEGIN").await.unwrap();
                let sql = "SELECT removed, upto, floor, busy FROM sqlstreams.compact(1, $1, $2, '0', '0')";
                let row = db.query_one(sql, &[&upto, &random.i64(1..300)]).await.unwrap();
                db.batch_execute(if undone { "ROLLBACK" } else { "COMMIT" }).await.unwrap();
                if !undone {
                    removed += row.get::<_, i64>(0);
                    upto = if row.get::<_, i64>(1) >= row.get::<_, i64>(2) { 0 } else { row.get(1) };
                }
                tokio::time::sleep(Duration::from_millis(random.u64(0..8))).await;
            }
            removed
        }));
    }

    let producer = stream.producer();
    let late = connect(&url).await;
    let mut model: BTreeMap<String, Option<u64>> = BTreeMap::new();
    let mut sent: BTreeMap<String, BTreeSet<i64>> = BTreeMap::new();
    let mut consumers = vec![consume(&groups[0], &seen), consume(&groups[1], &seen)];
    let mut open = false;
    for turn in 0..600_u64 {
        let key = format!("k{}", random.u32(0..25));
        let value = (random.u32(0..5) > 0).then_some(turn);
        let receipt = match value {
            Some(_) => producer.send(&value).key(&key).await,
            None => producer.send_tombstone(&key).await,
        };
        sent.entry(key.clone()).or_default().insert(receipt.unwrap().id);
        model.insert(key.clone(), value);
        match random.u32(0..20) {
            // A transaction of a key of its own that holds the log up for a while, and is then committed or not.
            0 if !open => {
                let key = format!("late{turn}");
                late.batch_execute("BEGIN").await.unwrap();
                let id = stream.send_in(&late, &Some(turn)).key(&key).await.unwrap().id;
                open = true;
                if random.bool() {
                    sent.entry(key.clone()).or_default().insert(id);
                    model.insert(key, Some(turn));
                } else {
                    late.batch_execute("ROLLBACK").await.unwrap();
                    open = false;
                }
            }
            1..=3 if open => {
                late.batch_execute("COMMIT").await.unwrap();
                open = false;
            }
            // A consumer dies.
            4 => {
                let at = random.usize(0..2);
                consumers[at].abort();
                consumers[at] = consume(&groups[at], &seen);
            }
            _ => {}
        }
        let latest = stream.latest(&key).await.unwrap();
        assert_eq!(latest.map(|m| m.payload.unwrap()), value, "{key} in turn {turn}");
    }
    if open {
        late.batch_execute("COMMIT").await.unwrap();
    }
    consumers.push(consume(&groups[2], &seen));
    // One that begins now is handed at least the newest of each key.
    groups.push(stream.group("new").lease(lease).retry(retry).create().await.unwrap());
    consumers.push(consume(&groups[3], &seen));
    let head = count(&db, "SELECT sqlstreams.stream_head(1)").await;
    for group in &groups {
        let sql = format!("SELECT sqlstreams.is_resolved(1, {}, {head})::int::bigint", group.id());
        until(group.name(), Duration::from_secs(60), async || count(&db, &sql).await == 1).await;
    }
    let begun = Instant::now();
    let current = "SELECT count(*) FROM sqlstreams.message_log_1";
    let dead = "SELECT count(DISTINCT message_id) FROM sqlstreams.exception_queue_1";
    let most = count(&db, dead).await
        + i64::try_from(model.values().filter(|v| v.is_some()).count()).unwrap();
    until("the log is compacted", Duration::from_secs(30), async || {
        // Tombstones that are above dead letters stay as well.
        count(&db, current).await <= most + count(&db, dead).await
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    let mut removed = 0;
    for compactor in compactors {
        removed += compactor.await.unwrap();
    }
    println!("{removed} removed, the last within {:?}", begun.elapsed());
    assert!(removed > 300);

    let expected: Vec<(String, u64)> =
        model.iter().filter_map(|(key, value)| value.map(|v| (key.clone(), v))).collect();
    let current = stream.current(None, 10_000).await.unwrap().messages;
    let current: Vec<(String, u64)> =
        current.into_iter().map(|m| (m.key.unwrap(), m.payload.unwrap())).collect();
    assert_eq!(current, expected);
    let seen = seen.lock().unwrap().clone();
    for group in &groups {
        let seen = &seen[group.name()];
        let letters = group.dead_letters(0, 10_000).await.unwrap();
        let dead: BTreeSet<i64> = letters.iter().map(|letter| letter.message_id).collect();
        // Their messages are all there.
        let read = stream.read(&dead.iter().copied().collect::<Vec<_>>()).await.unwrap();
        assert_eq!(read.len(), dead.len(), "{}", group.name());
        for (key, ids) in &sent {
            let got = seen.get(key).cloned().unwrap_or_default();
            let missing: Vec<_> =
                ids.iter().filter(|id| !got.contains(id) && !dead.contains(id)).collect();
            let newest = ids.last().unwrap();
            match group.name() {
                "new" => assert!(
                    model[key].is_none() || !missing.contains(&newest),
                    "new lacks {newest} of {key}"
                ),
                name => assert!(missing.is_empty(), "{name} lacks {missing:?} of {key}"),
            }
        }
    }
    for consumer in consumers {
        consumer.abort();
    }
}
