//! Moving a group to another place of its stream while it is consumed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fastrand::Rng;
use sqlstreams::{CancellationToken, Client, Delivery, ErrorKind, Group, Mode, Outgoing, Start};
use tokio::task::JoinHandle;

use crate::plain::{Plain, ids_of, installed};
use crate::support::{client_at, count, database, eventually, numbers};

type Counts = Arc<Mutex<BTreeMap<i64, u32>>>;

/// A consumer in a client of its own, which counts what it handles.
async fn consumer(
    url: &str,
    mode: Mode,
    counts: &Counts,
    stop: &CancellationToken,
) -> JoinHandle<sqlstreams::Result<sqlstreams::Consumed>> {
    let client = Client::connect(url).await.unwrap();
    let stream = client.stream::<u64>("s").open().await.unwrap();
    let (counts, stop) = (counts.clone(), stop.clone());
    tokio::spawn(async move {
        let consumer = stream.group("g").mode(mode).consumer().concurrency(4).stop_on(stop);
        consumer
            .run(move |message: Delivery<u64>| {
                *counts.lock().unwrap().entry(message.id).or_default() += 1;
                std::future::ready(())
            })
            .await
    })
}

async fn is_idle(group: &Group<u64>) -> bool {
    let status = group.status().await.unwrap();
    let open = status.open_leases + status.ready + status.inflight + status.deferred;
    status.resolved == status.head && open == 0 && status.replaying == 0
}

/// Waits until each message was handled so often, and nothing is left to do.
async fn settled(what: &str, counts: &Counts, expected: &BTreeMap<i64, u32>, group: &Group<u64>) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while *counts.lock().unwrap() != *expected || !is_idle(group).await {
        if Instant::now() > deadline {
            let now = counts.lock().unwrap().clone();
            let other: Vec<_> = expected.iter().filter(|(id, n)| now.get(id) != Some(n)).collect();
            let status = group.status().await;
            panic!("{what}: expected {other:?} of {now:?}, {status:?}");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Three consumers follow back and forth: each message above the new place comes exactly once more, and none below it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn running_consumers_follow_back_and_forth() {
    for mode in [Mode::Parallel, Mode::Fair, Mode::Ordered] {
        let url = database().await;
        let (client, _db) = client_at(&url).await;
        let stream = client.stream::<u64>("s").create().await.unwrap();
        let payloads: Vec<u64> = (0..600).collect();
        let keys: Vec<String> = payloads.iter().map(|n| format!("k{}", n % 17)).collect();
        let messages = payloads.iter().zip(&keys).map(|(n, key)| Outgoing::new(n).key(key));
        stream.producer().send_all(messages).await.unwrap();
        let group = stream.group("g").mode(mode).create().await.unwrap();
        let (counts, stop) = (Counts::default(), CancellationToken::new());
        let mut consumers = Vec::new();
        for _ in 0..3 {
            consumers.push(consumer(&url, mode, &counts, &stop).await);
        }
        let mut expected: BTreeMap<i64, u32> = (1..=600).map(|id| (id, 1)).collect();
        let mut random = Rng::new();
        for round in 0..10 {
            // Leases of finished messages are settled within moments.
            settled(&format!("{mode} {round}"), &counts, &expected, &group).await;
            let after = random.i64(0..=600);
            let sought = group.seek(Start::Id(after + 1)).run();
            let sought =
                if after == 600 { group.seek(Start::Latest).run().await } else { sought.await };
            let sought = sought.unwrap();
            assert_eq!(
                (sought.after, sought.repeated, sought.skipped),
                (after, 600 - after, 0),
                "{mode} {round}"
            );
            expected.iter_mut().filter(|(id, _)| **id > after).for_each(|(_, n)| *n += 1);
        }
        settled(&format!("{mode}"), &counts, &expected, &group).await;

        // In the midst of it all: nothing is lost that lies above the last place.
        for _ in 0..12 {
            group.seek(Start::Id(random.i64(1..=600))).run().await.unwrap();
            tokio::time::sleep(Duration::from_millis(random.u64(0..30))).await;
        }
        // Before it goes back: some come again before we hear that it has.
        let before: BTreeMap<i64, u32> = counts.lock().unwrap().clone();
        group.seek(Start::Beginning).run().await.unwrap();
        eventually(async || {
            let now = counts.lock().unwrap().clone();
            let all = before.iter().all(|(id, n)| now[id] > *n);
            all && is_idle(&group).await
        })
        .await;
        stop.cancel();
        for consumer in consumers {
            consumer.await.unwrap().unwrap();
        }
    }
}

/// What was handed out before proves nothing afterwards, in every way in which it can be said.
#[tokio::test]
async fn what_an_old_lease_says_is_refused() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(40).await;
    let below = plain.claim(10).await.unwrap();
    let across = plain.claim(10).await.unwrap();
    let failing = plain.claim(3).await.unwrap();
    assert!(
        plain
            .fail(
                &failing,
                &[(21, "retry", Some(0.0)), (22, "retry", Some(0.0)), (23, "dead", None)]
            )
            .await
    );
    let (token, ids) = plain.claim_exceptions(10, false).await;
    assert_eq!(ids, [21, 22]);
    let sql = "SELECT repeated, skipped, ended_leases, unfinished, restarted, dead FROM sqlstreams.seek(1, $1, p_id => 15)";
    let row = plain.db.query_one(sql, &[&plain.group]).await.unwrap();
    let told: Vec<i64> = (0..6).map(|i| row.get(i)).collect();
    assert_eq!(told, [9, 0, 2, 14, 2, 1]);

    assert!(!plain.settle(&below, "{[1,10]}").await && !plain.settle(&across, "{[11,20]}").await);
    assert!(!plain.fail(&across, &[(17, "dead", None)]).await);
    assert_eq!(plain.extend(&[(&below, "{}"), (&across, "{}")]).await, [None, None]);
    assert_eq!(plain.release(&[(&across, "{}")]).await, [across.token]);
    assert_eq!(plain.try_fetch(across.token).await.unwrap(), [0_i64; 0]);
    let (lost, _) = plain.advance(&[(&below, "{[1,10]}"), (&across, "{}")], 0).await;
    assert_eq!(lost, [below.token, across.token]);
    let verdicts = [(21, "ok", None), (22, "dead", None)];
    assert_eq!(plain.settle_exceptions(token, &verdicts).await.len(), 2);

    // What lay below is handed out anew, then everything above but the dead letter.
    let mut seen = Vec::new();
    while let Some(lease) = plain.claim(100).await {
        seen.extend(plain.fetch(&lease).await);
        assert!(plain.settle(&lease, "{(,)}").await);
    }
    assert_eq!(seen, (1..=40).filter(|id| *id != 23).collect::<Vec<i64>>());
    assert_eq!(plain.exception(23).await, "dead a1 d0 l0 r0");
    assert_eq!(plain.exception(21).await, "gone");
}

/// A handler that settles in its transaction when the group has been moved rolls back.
#[tokio::test]
async fn a_transaction_that_comes_too_late_rolls_back() {
    let url = database().await;
    let plain = installed(&url).await;
    plain
        .db
        .batch_execute(&format!(
            "SELECT sqlstreams.alter_group(1, {}, p_transactional => true)",
            plain.group
        ))
        .await
        .unwrap();
    plain.produce(4).await;
    let old = plain.claim(4).await.unwrap();
    let settle = |token, id: i64| {
        format!(
            "SELECT sqlstreams.settle_in_transaction(1, {}, '{token}', '{{{id}}}')",
            plain.group
        )
    };
    plain.db.batch_execute(&settle(old.token, 1)).await.unwrap();
    plain.db.query("SELECT sqlstreams.seek(1, $1, 'beginning')", &[&plain.group]).await.unwrap();
    let error = plain.db.batch_execute(&settle(old.token, 2)).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "SQ008");
    // What had been settled comes again, and counts again.
    let new = plain.claim(4).await.unwrap();
    for id in 1..=4 {
        plain.db.batch_execute(&settle(new.token, id)).await.unwrap();
    }
    assert!(plain.settle(&new, "{(,)}").await);
    assert_eq!(count(&plain.db, "SELECT count(*) FROM sqlstreams.consumer_done_1").await, 0);
}

/// Rows in all states on both sides of the place, and what becomes of them.
#[tokio::test]
async fn what_becomes_of_exceptions_is_chosen() {
    for (unfinished, dead) in
        [("keep", "keep"), ("keep", "repeat"), ("drop", "keep"), ("drop", "repeat")]
    {
        let url = database().await;
        let plain = installed(&url).await;
        plain.produce(20).await;
        let lease = plain.claim(20).await.unwrap();
        // 1, 11: wait; 2, 12: run; 3, 13: dead; 4, 14: pending in the lease; the others are done.
        let failed: Vec<_> =
            [(1, "retry", Some(900.0)), (2, "retry", Some(0.0)), (3, "dead", None)]
                .into_iter()
                .flat_map(|(id, outcome, delay)| [(id, outcome, delay), (id + 10, outcome, delay)])
                .collect();
        assert!(plain.fail(&lease, &failed).await);
        assert_eq!(plain.claim_exceptions(9, false).await.1, [2, 12]);
        assert!(plain.settle(&lease, "{[5,11),[15,21)}").await);

        let sql = "SELECT unfinished, restarted, dead FROM sqlstreams.seek(1, $1, p_id => 11, p_unfinished => $2, p_dead => $3, p_preview => $4)";
        let params = |preview: &'static bool| -> [&(dyn tokio_postgres::types::ToSql + Sync); 4] {
            [&plain.group, &unfinished, &dead, preview]
        };
        let state = plain.state().await;
        let preview = plain.db.query_one(sql, &params(&true)).await.unwrap();
        assert_eq!(plain.state().await, state, "a preview changes nothing");
        let row = plain.db.query_one(sql, &params(&false)).await.unwrap();
        for column in 0..3 {
            assert_eq!(row.get::<_, i64>(column), preview.get::<_, i64>(column));
        }
        assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1), row.get::<_, i64>(2)), (3, 2, 1));

        let kept = if unfinished == "keep" { ["ready a1 d0 l0 r0"; 2] } else { ["gone"; 2] };
        assert_eq!([plain.exception(1).await, plain.exception(2).await], kept);
        assert_eq!([plain.exception(11).await, plain.exception(12).await], ["gone"; 2]);
        assert_eq!(plain.exception(3).await, "dead a1 d0 l0 r0");
        assert_eq!(
            plain.exception(13).await,
            if dead == "keep" { "dead a1 d0 l0 r0" } else { "gone" }
        );
        let mut seen = Vec::new();
        while let Some(lease) = plain.claim(100).await {
            seen.extend(plain.fetch(&lease).await);
            assert!(plain.settle(&lease, "{(,)}").await);
        }
        let expected: Vec<i64> = (1..=20)
            .filter(|id| {
                *id > 10 && (*id != 13 || dead == "repeat") || *id == 4 && unfinished == "keep"
            })
            .collect();
        assert_eq!(seen, expected, "{unfinished} {dead}");
        // It runs at once: nothing was counted against it.
        let due = if unfinished == "keep" { vec![2] } else { vec![] };
        assert_eq!(plain.claim_exceptions(9, false).await.1, due);
    }
}

/// Very many dead letters lie scattered above the place: they are left out, leases stay small, and all else comes once.
#[tokio::test]
async fn dead_letters_are_left_out_however_many_there_are() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(3_000).await;
    let lease = plain.claim(3_000).await.unwrap();
    // Each third, and 1,000 in a row.
    let is_dead = |id: i64| id % 3 == 0 || (1_000..2_000).contains(&id);
    let dead: Vec<_> = (1..=3_000).filter(|id| is_dead(*id)).map(|id| (id, "dead", None)).collect();
    assert!(plain.fail(&lease, &dead).await && plain.settle(&lease, "{(,)}").await);
    plain.db.query("SELECT sqlstreams.seek(1, $1, 'beginning')", &[&plain.group]).await.unwrap();
    let mut seen = Vec::new();
    while let Some(lease) = plain.claim(1_000).await {
        assert!(lease.pending.matches('[').count() <= 64, "{}", lease.pending);
        seen.extend(ids_of(&lease.pending));
        assert!(plain.settle(&lease, "{(,)}").await);
    }
    assert_eq!(seen, (1..=3_000).filter(|id| !is_dead(*id)).collect::<Vec<i64>>());
    let sql = "SELECT count(*) FROM sqlstreams.consumer_group_cursor_1 WHERE claimed = 3000 AND reread_to IS NULL";
    assert_eq!(count(&plain.db, sql).await, 1, "nothing is left that claims would have to pay for");
    let dead = format!("SELECT count(*) FROM {} WHERE state = 'dead'", plain.exceptions());
    assert_eq!(count(&plain.db, &dead).await, (1..=3_000).filter(|id| is_dead(*id)).count() as i64);
}

/// What is read again is judged by the bindings that hold now; what was kept, by those it was claimed under.
#[tokio::test]
async fn what_is_read_again_is_judged_by_present_bindings() {
    let url = database().await;
    let plain = installed(&url).await;
    let sql = "INSERT INTO sqlstreams.message_log_1 (payload, routing_key) SELECT '1', CASE n % 2 WHEN 0 THEN 'a' ELSE 'b' END FROM generate_series(1, 40) AS n";
    plain.db.batch_execute(sql).await.unwrap();
    let group = plain.group;
    let bind = |pattern: &str| {
        format!("SELECT sqlstreams.set_bindings(1, {group}, '[{{\"pattern\": \"{pattern}\"}}]')")
    };
    plain.db.batch_execute(&bind("a")).await.unwrap();
    let kept = plain.claim(2).await.unwrap();
    assert_eq!(ids_of(&kept.pending).into_iter().collect::<Vec<_>>(), [2, 4]);
    while let Some(lease) = plain.claim(100).await {
        assert!(plain.settle(&lease, "{(,)}").await);
    }
    plain.db.batch_execute(&bind("b")).await.unwrap();
    plain.db.query("SELECT sqlstreams.seek(1, $1, p_id => 11)", &[&group]).await.unwrap();
    let mut seen = Vec::new();
    while let Some(lease) = plain.claim(100).await {
        seen.extend(plain.fetch(&lease).await);
        assert!(plain.settle(&lease, "{(,)}").await);
    }
    let expected: Vec<i64> = [2, 4].into_iter().chain((11..=40).filter(|id| id % 2 == 1)).collect();
    assert_eq!(seen, expected);
}

/// Messages of a key come in order from the new place on, behind one that waits below it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn order_is_kept_from_the_new_place_on() {
    let url = database().await;
    let (client, _db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let payloads: Vec<u64> = (0..200).collect();
    stream
        .producer()
        .send_all(payloads.iter().map(|n| Outgoing::new(n).key(format!("k{}", n % 5))))
        .await
        .unwrap();
    let retry = sqlstreams::RetryPolicy::attempts(1_000).backoff(
        Duration::from_millis(20),
        1.0,
        Duration::from_millis(20),
    );
    let group = stream.group("g").ordered().retry(retry).create().await.unwrap();
    let (blocked, stop) = (Arc::new(AtomicBool::new(true)), CancellationToken::new());
    let seen = Arc::<Mutex<Vec<i64>>>::default();
    let run = {
        let (blocked, seen, stop, group) =
            (blocked.clone(), seen.clone(), stop.clone(), group.clone());
        tokio::spawn(async move {
            let consumer = group.consumer().concurrency(8).stop_on(stop);
            consumer
                .run(move |message: Delivery<u64>| {
                    let fails = message.id == 11 && blocked.load(Ordering::SeqCst);
                    if !fails {
                        seen.lock().unwrap().push(message.id);
                    }
                    std::future::ready(if fails { Err("not yet") } else { Ok(()) })
                })
                .await
        })
    };
    let key = |id: i64| (id - 1) % 5;
    // All but the key of 11, which waits with what comes after it.
    eventually(async || seen.lock().unwrap().len() == 200 - 38).await;
    group.seek(Start::Id(101)).run().await.unwrap();
    eventually(async || seen.lock().unwrap().len() == 200 - 38 + 80).await;
    blocked.store(false, Ordering::SeqCst);
    eventually(async || is_idle(&group).await).await;
    stop.cancel();
    run.await.unwrap().unwrap();
    let seen = seen.lock().unwrap().clone();
    for of in 0..5 {
        let mut ids: Vec<i64> = seen.iter().copied().filter(|id| key(*id) == of).collect();
        if of == key(11) {
            // What waited was begun and not finished at or below the place, or is read from there on: once each.
            assert_eq!(ids, (1..=200).filter(|id| key(*id) == of).collect::<Vec<_>>());
        } else {
            let again = ids.split_off(40);
            assert_eq!(ids, (1..=200).filter(|id| key(*id) == of).collect::<Vec<_>>());
            assert_eq!(again, (101..=200).filter(|id| key(*id) == of).collect::<Vec<_>>());
        }
    }
}

/// By time, to both ends, beyond the end; with what is told, audited and refused.
#[tokio::test]
async fn every_kind_of_place_is_found_and_told() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = numbers(&client, "s", 100).await;
    db.batch_execute("UPDATE sqlstreams.message_log_1 SET produced_at = now() - (1000 - id) * interval '1 minute'").await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    let sought = group.seek(Start::Latest).run().await.unwrap();
    assert_eq!((sought.before, sought.after, sought.repeated, sought.skipped), (0, 100, 0, 100));
    let at = std::time::SystemTime::now() - Duration::from_secs(60 * 960 - 30);
    let back = group.seek(Start::Time(at));
    let preview = back.preview().await.unwrap();
    assert_eq!(group.status().await.unwrap().claimed, 100);
    assert_eq!(back.run().await.unwrap(), preview);
    assert_eq!((preview.before, preview.after, preview.repeated), (100, 40, 60));
    assert_eq!(group.seek(Start::Beginning).run().await.unwrap().after, 0);
    assert_eq!(group.seek(Start::Id(101)).run().await.unwrap().after, 100);
    for beyond in
        [Start::Id(102), Start::Time(std::time::SystemTime::now() + Duration::from_secs(3_600))]
    {
        assert_eq!(group.seek(beyond).run().await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    for wrong in [
        "",
        ", 'end'",
        ", 'latest', 7",
        ", 'latest', p_unfinished => 'lose'",
        ", 'latest', p_dead => NULL",
    ] {
        let sql = format!("SELECT sqlstreams.seek(1, 1{wrong})");
        assert_eq!(
            db.query(&sql, &[]).await.unwrap_err().code().unwrap().code(),
            "SQ004",
            "{wrong}"
        );
    }
    let error = db.query("SELECT sqlstreams.seek(1, 99, 'latest')", &[]).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "SQ002");
    let audited = "SELECT count(*) FROM sqlstreams.audit WHERE action = 'seek' AND group_name = 'g' AND detail ? 'after_id'";
    assert_eq!(count(&db, audited).await, 4);
}

/// One message that nobody settled, behind very many that were: everything is started anew, and only that one comes again.
#[tokio::test]
async fn tb_153_only_what_was_not_settled_comes_again() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(20_000).await;
    let first = plain.claim(1).await.unwrap();
    while let Some(lease) = plain.claim(5_000).await {
        assert!(plain.settle(&lease, "{(,)}").await);
    }
    plain.expire_leases().await;
    let again = Plain { db: crate::support::connect(&url).await, stream: 1, group: plain.group };
    let lease = again.claim(1_000_000).await.unwrap();
    assert_eq!(again.fetch(&lease).await, [1]);
    assert_ne!(lease.token, first.token);
    assert_eq!(again.claim(1_000_000).await, None);
}

/// In a transaction that has been open for long `now()` is long ago: leases and due times count from when they were made.
#[tokio::test]
async fn tb_134_a_lease_made_in_an_old_transaction_is_no_older_than_it_is() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(2).await;
    plain.db.batch_execute("BEGIN; SELECT pg_sleep(1.5)").await.unwrap();
    let lease = plain.claim(1).await.unwrap();
    let left = format!(
        "SELECT count(*) FROM {} WHERE expires_at > clock_timestamp() + interval '14 seconds'",
        plain.leases()
    );
    assert_eq!(count(&plain.db, &left).await, 1);
    assert!(plain.fail(&lease, &[(1, "retry", Some(60.0))]).await);
    plain.db.query("SELECT sqlstreams.seek(1, $1, 'latest')", &[&plain.group]).await.unwrap();
    plain.db.batch_execute("COMMIT").await.unwrap();
    let due = format!(
        "SELECT count(*) FROM {} WHERE due_at > clock_timestamp() + interval '58 seconds'",
        plain.exceptions()
    );
    assert_eq!(count(&plain.db, &due).await, 1);
}
