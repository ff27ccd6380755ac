//! Handing out a range of a stream once more, beside everything else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use sqlstreams::{
    Binding, CancellationToken, Client, Delivery, ErrorKind, Group, Mode, Outgoing, RetryPolicy,
    Start, Stream,
};

use crate::plain::{Lease, Plain, ids_of, installed};
use crate::support::{client_at, connect, count, database, eventually, numbers};

type Counts = Arc<Mutex<BTreeMap<i64, u32>>>;

async fn replay(plain: &Plain, from: i64, upto: i64) -> i64 {
    let sql = "SELECT replay FROM sqlstreams.replay(1, $1, $2, $3)";
    plain.db.query_one(sql, &[&plain.group, &from, &upto]).await.unwrap().get(0)
}

/// What can be claimed, in the order in which it comes; everything is settled.
async fn rest(plain: &Plain, limit: i64) -> Vec<Vec<i64>> {
    let mut leases = Vec::new();
    while let Some(lease) = plain.claim(limit).await {
        leases.push(plain.fetch(&lease).await);
        assert!(plain.settle(&lease, "{(,)}").await);
    }
    leases
}

/// Claims and settles everything there is.
async fn caught_up(plain: &Plain) {
    while let Some(lease) = plain.claim(100_000).await {
        assert!(plain.settle(&lease, "{(,)}").await);
    }
}

async fn replaying(plain: &Plain) -> i64 {
    count(&plain.db, "SELECT replaying FROM sqlstreams.list_cursors('s', 'g')").await
}

/// The cursor does not move, nothing outside of the range comes, and what has a place already is left out.
#[tokio::test]
async fn a_range_comes_once_more_but_for_what_has_a_place() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(100).await;
    let lease = plain.claim(100).await.unwrap();
    // 30 waits, 31 is dead, 32 runs; 40 to 44 are in a lease.
    assert!(
        plain
            .fail(
                &lease,
                &[(30, "retry", Some(900.0)), (31, "dead", None), (32, "retry", Some(0.0))]
            )
            .await
    );
    assert_eq!(plain.claim_exceptions(1, false).await.1, [32]);
    assert!(plain.settle(&lease, "{[1,39],[45,100]}").await);
    replay(&plain, 21, 60).await;
    assert_eq!((replaying(&plain).await, plain.claimed().await), (40, 100));
    let resolved = "SELECT resolved FROM sqlstreams.list_cursors('s', 'g')";
    assert_eq!(count(&plain.db, resolved).await, 39);
    let held = plain.claim(7).await.unwrap();
    assert_eq!(plain.fetch(&held).await, (21..=27).collect::<Vec<i64>>());
    assert_eq!(
        (replaying(&plain).await, count(&plain.db, resolved).await),
        (40, 39),
        "replays do not hold it back"
    );
    assert!(plain.settle(&held, "{(,)}").await);
    assert_eq!(replaying(&plain).await, 33);
    let seen = rest(&plain, 9).await.concat();
    let expected: Vec<i64> =
        (28..=60).filter(|id| !(30..=32).contains(id) && !(40..=44).contains(id)).collect();
    assert_eq!(seen, expected);
    assert_eq!((replaying(&plain).await, plain.claimed().await), (0, 100));
    assert!(plain.settle(&lease, "{(,)}").await, "who held some of it holds it still");
    let over = "SELECT count(*) FROM sqlstreams.list_replays(1, $1) WHERE waiting + leased = 0 AND NOT cancelled";
    assert_eq!(plain.db.query_one(over, &[&plain.group]).await.unwrap().get::<_, i64>(0), 1);
    let row = "SELECT count(*) FROM sqlstreams.consumer_group_cursor_1 WHERE replays IS NULL";
    assert_eq!(count(&plain.db, row).await, 1, "nothing is left that claims would have to pay for");
}

/// Fresh messages and replayed ones come in turn: neither waits for the other's end.
#[tokio::test]
async fn what_is_fresh_does_not_wait_for_a_replay() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(2_000).await;
    caught_up(&plain).await;
    replay(&plain, 1, 2_000).await;
    plain.produce(2_000).await;
    let leases = rest(&plain, 10).await;
    let half: Vec<bool> = leases.iter().take(200).map(|ids| ids[0] > 2_000).collect();
    let fresh = half.iter().filter(|fresh| **fresh).count();
    assert!((40..160).contains(&fresh), "{fresh} of 200 leases");
    let mut ids = leases.concat();
    ids.sort_unstable();
    assert_eq!(ids, (1..=4_000).collect::<Vec<i64>>());
}

/// Three consumers drain it while handlers fail and one consumer after the other is killed: every message once, but for those that were in such hands.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn consumers_drain_a_replay_through_failures_and_kills() {
    for mode in [Mode::Parallel, Mode::Fair] {
        let url = database().await;
        let (client, _db) = client_at(&url).await;
        let stream = client.stream::<u64>("s").create().await.unwrap();
        let payloads: Vec<u64> = (0..4_000).collect();
        stream
            .producer()
            .send_all(payloads.iter().map(|n| Outgoing::new(n).key(format!("k{}", n % 13))))
            .await
            .unwrap();
        let retry = RetryPolicy::attempts(3).backoff(Duration::ZERO, 1.0, Duration::ZERO);
        let group = stream
            .group("g")
            .mode(mode)
            .retry(retry)
            .lease(Duration::from_secs(2))
            .start(Start::Latest)
            .create()
            .await
            .unwrap();
        let begun = Counts::default();
        let ended = Counts::default();
        group.replay().from_id(501).upto_id(3_500).start().await.unwrap().unwrap();
        let mut killed = 0;
        for round in 0.. {
            let stop = CancellationToken::new();
            let consumers: Vec<_> = (0..3)
                .map(|_| {
                    let (url, stop, begun, ended) =
                        (url.clone(), stop.clone(), begun.clone(), ended.clone());
                    tokio::spawn(async move {
                        let client = Client::connect(&url).await.unwrap();
                        let stream = client.stream::<u64>("s").open().await.unwrap();
                        let consumer = stream.group("g").consumer().concurrency(4).stop_on(stop);
                        consumer
                            .run(move |message: Delivery<u64>| {
                                let (begun, ended) = (begun.clone(), ended.clone());
                                async move {
                                    *begun.lock().unwrap().entry(message.id).or_default() += 1;
                                    tokio::time::sleep(Duration::from_millis(2)).await;
                                    // Each hundredth fails twice, each thousandth always.
                                    if message.payload % 1_000 == 999
                                        || message.payload.is_multiple_of(100)
                                            && message.attempt() < 3
                                    {
                                        return Err("it fails");
                                    }
                                    *ended.lock().unwrap().entry(message.id).or_default() += 1;
                                    Ok(())
                                }
                            })
                            .await
                    })
                })
                .collect();
            if round < 3 {
                // Some way on one of them is gone, without a word: its process's connections are cut with it.
                let goal = (round + 1) * 500;
                eventually(async || ended.lock().unwrap().len() >= goal).await;
                consumers[0].abort();
                killed += 1;
            } else {
                eventually(async || {
                    let status = group.status().await.unwrap();
                    status.replaying == 0
                        && status.ready + status.inflight + status.open_leases == 0
                })
                .await;
            }
            stop.cancel();
            for consumer in consumers.into_iter().skip(if round < 3 { 1 } else { 0 }) {
                consumer.await.unwrap().unwrap();
            }
            if round == 3 {
                break;
            }
        }
        let status = group.status().await.unwrap();
        assert_eq!((status.claimed, status.dead), (4_000, 3));
        let (begun, ended) = (begun.lock().unwrap().clone(), ended.lock().unwrap().clone());
        let wanted: Vec<i64> = (501..=3_500).collect();
        assert_eq!(begun.keys().copied().collect::<Vec<_>>(), wanted, "{mode}");
        assert_eq!(ended.len(), 3_000 - 3, "all but the dead letters");
        // What a consumer had in its hands and had not told when it was killed: about a second's work of it.
        let repeated = ended.values().filter(|n| **n > 1).count();
        println!("{mode}: {repeated} messages twice after {killed} kills");
        assert!(ended.values().all(|n| *n <= 1 + killed), "no more often than there were kills");
    }
}

/// A filter, and what the group's own bindings say of it now.
#[tokio::test]
async fn only_what_matches_is_replayed() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").partition_size(1_000).create().await.unwrap();
    let sql = "INSERT INTO sqlstreams.message_log_1 (payload, routing_key, headers)
               SELECT to_json(n), CASE WHEN n % 5000 = 7 THEN 'rare.' ELSE 'often.' END || CASE n % 3 WHEN 0 THEN 'eu' ELSE 'us' END, jsonb_build_object('vip', n % 2 = 0)
               FROM generate_series($1::int, $2::int) AS n";
    for first in (1..30_000).step_by(1_000) {
        db.query("SELECT sqlstreams.ensure_partitions(1, 3)", &[]).await.unwrap();
        db.execute(sql, &[&first, &(first + 999)]).await.unwrap();
    }
    let group = stream.group("g").start(Start::Latest).create().await.unwrap();
    let plain = Plain { db: connect(&url).await, stream: 1, group: group.id() };
    let replay = |bindings: Vec<Binding>| {
        let replay = group.replay().from_id(5_001);
        bindings.into_iter().fold(replay, |replay, binding| replay.bind(binding))
    };
    let ids = async || {
        let mut ids: Vec<i64> = Vec::new();
        while group.status().await.unwrap().replaying > 0 {
            let lease: Option<Lease> = plain.claim(1_000).await;
            if let Some(lease) = lease {
                assert!(lease.pending.matches('[').count() <= 64);
                ids.extend(plain.fetch(&lease).await);
                assert!(plain.settle(&lease, "{(,)}").await);
            }
        }
        ids
    };
    let all =
        |holds: fn(i64) -> bool| (5_001..=30_000).filter(|id| holds(*id)).collect::<Vec<i64>>();
    let rare = replay(vec!["rare.#".into()]).start().await.unwrap().unwrap();
    assert_eq!((rare.from, rare.upto), (5_001, 30_000));
    assert_eq!(ids().await, all(|id| id % 5_000 == 7));
    replay(vec!["rare.#".into(), Binding::from("*.eu").header("vip", true)])
        .start()
        .await
        .unwrap()
        .unwrap();
    assert_eq!(ids().await, all(|id| id % 5_000 == 7 || id % 6 == 0));

    // The group's own bindings count, as they are when it begins, whatever held when the messages were claimed.
    group.set_bindings(["*.eu".into()]).await.unwrap();
    replay(vec![]).upto_id(8_000).start().await.unwrap().unwrap();
    group.set_bindings(["rare.#".into()]).await.unwrap();
    assert_eq!(ids().await, (5_001..=8_000).filter(|id| id % 3 == 0).collect::<Vec<i64>>());
    let listed = group.replays().await.unwrap();
    assert_eq!(listed.len(), 3);
    assert_eq!(listed[1].bindings, ["rare.#".into(), Binding::from("*.eu").header("vip", true)]);
    let wrong = replay(vec!["a..b".into()]).start().await.unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::InvalidBinding);
}

/// Limits count replayed messages like all others.
#[tokio::test]
async fn limits_hold_for_replays() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(300).await;
    caught_up(&plain).await;
    plain
        .db
        .batch_execute(&format!(
            "SELECT sqlstreams.alter_group(1, {}, p_max_in_flight => 5)",
            plain.group
        ))
        .await
        .unwrap();
    replay(&plain, 1, 300).await;
    let mut ids = Vec::new();
    for _ in 0..60 {
        let lease = plain.claim(100).await.unwrap();
        assert!(ids_of(&lease.pending).len() <= 5);
        assert_eq!(plain.claim(100).await, None);
        ids.extend(plain.fetch(&lease).await);
        assert!(plain.settle(&lease, "{(,)}").await);
    }
    assert_eq!(ids, (1..=300).collect::<Vec<i64>>());
}

/// One after the other, each of them listed, cancelled or run to its end.
#[tokio::test]
async fn replays_follow_each_other_and_can_be_cancelled() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = numbers(&client, "s", 100).await;
    let group = stream.group("g").start(Start::Latest).create().await.unwrap();
    let plain = Plain { db: connect(&url).await, stream: 1, group: group.id() };
    let start = async |from: i64, upto: i64| {
        group.replay().from_id(from).upto_id(upto).start().await.unwrap().unwrap().replay.unwrap()
    };
    let (first, second, third) = (start(1, 20).await, start(11, 30).await, start(50, 60).await);
    assert_eq!(group.status().await.unwrap().replaying, 20 + 20 + 11);
    let held = plain.claim(5).await.unwrap();
    assert_eq!(group.cancel_replay(Some(third)).await.unwrap(), 11);
    assert_eq!(group.cancel_replay(Some(third)).await.unwrap(), 0, "twice is harmless");
    assert!(plain.settle(&held, "{(,)}").await);
    let listed = group.replays().await.unwrap();
    let told: Vec<(i64, i64, bool)> =
        listed.iter().map(|r| (r.replay, r.waiting, r.cancelled)).collect();
    assert_eq!(told, [(third, 0, true), (second, 20, false), (first, 15, false)]);
    assert_eq!(rest(&plain, 100).await.concat(), (6..=20).chain(11..=30).collect::<Vec<i64>>());
    start(1, 100).await;
    let held = plain.claim(10).await.unwrap();
    assert_eq!(group.cancel_replay(None).await.unwrap(), 90);
    assert!(plain.settle(&held, "{(,)}").await, "what is in somebody's hands goes on");
    assert_eq!(plain.claim(10).await, None);
    // Nothing that the group has not claimed, and nothing without a place in the log.
    assert_eq!(group.replay().from_id(101).start().await.unwrap(), None);
    assert_eq!(group.replay().until(SystemTime::UNIX_EPOCH).start().await.unwrap(), None);
    let preview = group
        .replay()
        .from(SystemTime::UNIX_EPOCH)
        .until(SystemTime::now() + Duration::from_secs(60))
        .preview()
        .await
        .unwrap()
        .unwrap();
    assert_eq!((preview.replay, preview.from, preview.upto), (None, 1, 100));
    assert_eq!(
        count(&db, "SELECT count(*) FROM sqlstreams.replay").await,
        4,
        "a preview changes nothing"
    );
    for wrong in [
        "9, 8",
        "9, p_from => now()",
        "p_upto_id => 1, p_until => now()",
        "p_from => now() + interval '1 day'",
    ] {
        let error =
            db.query(&format!("SELECT sqlstreams.replay(1, 1, {wrong})"), &[]).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "SQ004", "{wrong}");
    }
    // No more than sixteen wait, and a hundred are remembered.
    for _ in 0..16 {
        start(1, 100).await;
    }
    let error = group.replay().start().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    for _ in 0..110 {
        group.cancel_replay(None).await.unwrap();
        start(1, 2).await;
    }
    assert_eq!(group.replays().await.unwrap().len(), 100);
    let kinds = "SELECT count(DISTINCT action) FROM sqlstreams.audit WHERE action IN ('replay', 'cancel_replay')";
    assert_eq!(count(&db, kinds).await, 2);
}

/// Ordered groups have none, and a group that has one does not become ordered.
#[tokio::test]
async fn ordered_groups_are_told_what_to_do_instead() {
    let url = database().await;
    let (client, _db) = client_at(&url).await;
    let stream: Stream<u64> = numbers(&client, "s", 100).await;
    let ordered: Group<u64> =
        stream.group("o").ordered().start(Start::Latest).create().await.unwrap();
    let error = ordered.replay().start().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongMode);
    assert!(error.hint().unwrap().contains("seek"), "{error:?}");
    let group = stream.group("g").start(Start::Latest).create().await.unwrap();
    group.replay().start().await.unwrap().unwrap();
    assert_eq!(group.set_mode(Mode::Ordered).await.unwrap_err().kind(), ErrorKind::GroupBusy);
    group.cancel_replay(None).await.unwrap();
    group.set_mode(Mode::Ordered).await.unwrap();
}

/// A group that is moved back while it replays: what lies above comes once, by the cursor, the rest by the replay.
#[tokio::test]
async fn a_seek_ends_a_replay_at_its_place() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(100).await;
    caught_up(&plain).await;
    replay(&plain, 11, 80).await;
    let old = plain.claim(10).await.unwrap();
    assert_eq!(ids_of(&old.pending), (11..=20).collect());
    plain.db.query("SELECT sqlstreams.seek(1, $1, p_id => 51)", &[&plain.group]).await.unwrap();
    assert!(!plain.settle(&old, "{(,)}").await);
    let mut ids = rest(&plain, 7).await.concat();
    ids.sort_unstable();
    assert_eq!(ids, (11..=100).collect::<Vec<i64>>());
    replay(&plain, 11, 80).await;
    let held = plain.claim(10).await.unwrap();
    plain
        .db
        .query("SELECT sqlstreams.seek(1, $1, 'latest', p_unfinished => 'drop')", &[&plain.group])
        .await
        .unwrap();
    assert!(!plain.settle(&held, "{(,)}").await);
    assert_eq!((plain.claim(10).await, replaying(&plain).await), (None, 0));
}

/// Handlers that settle in their transactions; what earlier ones left behind does not count as settled again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_is_settled_in_transactions() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = numbers(&client, "s", 200).await;
    db.batch_execute("CREATE TABLE effect (id bigint)").await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    let run = async || {
        let consumer = group.consumer().concurrency(4).until_caught_up();
        consumer
            .run_transactional(async |message: Delivery<u64>, tx| {
                tx.execute("INSERT INTO effect VALUES ($1)", &[&message.id]).await?;
                Ok::<_, tokio_postgres::Error>(())
            })
            .await
            .unwrap();
    };
    run().await;
    db.execute("INSERT INTO sqlstreams.consumer_done_1 VALUES ($1, 60), ($1, 61)", &[&group.id()])
        .await
        .unwrap();
    group.replay().from_id(51).upto_id(150).start().await.unwrap().unwrap();
    run().await;
    let sql = "SELECT count(*) FROM (SELECT id FROM effect GROUP BY id HAVING count(*) <> CASE WHEN id BETWEEN 51 AND 150 THEN 2 ELSE 1 END) AS x";
    assert_eq!(count(&db, sql).await, 0);
    assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 300);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.consumer_done_1").await, 0);
}

/// Below the place of a group that began at the latest message somebody may still commit: a replay waits for that.
#[tokio::test]
async fn a_replay_passes_over_nothing_that_is_not_committed() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(5).await;
    let writer = plain.again(&url).await;
    writer.db.batch_execute("BEGIN").await.unwrap();
    assert_eq!(writer.produce(1).await, [6]);
    plain.produce(5).await;
    plain.db.query("SELECT sqlstreams.seek(1, $1, 'latest')", &[&plain.group]).await.unwrap();
    replay(&plain, 1, 11).await;
    let before = rest(&plain, 100).await.concat();
    assert_eq!(before, (1..=5).collect::<Vec<i64>>());
    assert!(replaying(&plain).await > 0);
    writer.db.batch_execute("COMMIT").await.unwrap();
    let mut after = Vec::new();
    eventually(async || {
        plain.let_look().await;
        after.extend(rest(&plain, 100).await.concat());
        after.len() >= 6
    })
    .await;
    assert_eq!(after, (6..=11).collect::<Vec<i64>>());
    assert_eq!(replaying(&plain).await, 0);
}
