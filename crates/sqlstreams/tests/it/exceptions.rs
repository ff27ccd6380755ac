//! The life of a failed message: the state table, suspects, and a message that kills whoever holds it.

use crate::plain::{Plain, installed};
use crate::support::{client, count, database, numbers};

/// A message that has failed once and is due.
async fn failed(plain: &Plain) -> i64 {
    let id = plain.produce(1).await[0];
    let lease = plain.claim(1).await.unwrap();
    assert!(plain.fail(&lease, &[(id, "retry", Some(0.0))]).await);
    assert_eq!(plain.exception(id).await, "ready a1 d0 l0 r0");
    assert_eq!(
        count(&plain.db, &format!("SELECT count(*) FROM {}", plain.leases())).await,
        0,
        "one place"
    );
    id
}

async fn seconds_until_due(plain: &Plain, id: i64) -> f64 {
    let sql = format!(
        "SELECT extract(epoch FROM due_at - clock_timestamp())::float8 FROM {} WHERE group_id = $1 AND message_id = $2",
        plain.exceptions()
    );
    plain.db.query_one(&sql, &[&plain.group, &id]).await.unwrap().get(0)
}

/// first delivery: error, Delay(d), dead on purpose
#[tokio::test]
async fn a_first_delivery_that_fails() {
    let plain = installed(&database().await).await;
    let ids = plain.produce(6).await;
    let lease = plain.claim(10).await.unwrap();
    let verdicts = [
        (ids[0], "retry", None),
        (ids[1], "retry", Some(50.0)),
        (ids[2], "delay", Some(70.0)),
        (ids[3], "dead", None),
    ];
    assert!(plain.fail(&lease, &verdicts).await);
    assert_eq!(plain.exception(ids[0]).await, "ready a1 d0 l0 r0");
    assert!(seconds_until_due(&plain, ids[0]).await <= 1.0, "the group's backoff begins with 1 s");
    assert_eq!(plain.exception(ids[1]).await, "ready a1 d0 l0 r0");
    assert!((40.0..=50.0).contains(&seconds_until_due(&plain, ids[1]).await));
    assert_eq!(plain.exception(ids[2]).await, "ready a0 d1 l0 r0");
    assert!((60.0..=70.0).contains(&seconds_until_due(&plain, ids[2]).await));
    assert_eq!(plain.exception(ids[3]).await, "dead a1 d0 l0 r0");
    // What did not fail stays where it was.
    assert_eq!(plain.fetch(&lease).await, ids[4..]);
    // With one attempt allowed, the first failure is the last.
    plain.db.batch_execute("UPDATE sqlstreams.consumer_group SET max_attempts = 1").await.unwrap();
    assert!(plain.fail(&lease, &[(ids[4], "retry", None)]).await);
    assert_eq!(plain.exception(ids[4]).await, "dead a1 d0 l0 r0");
}

/// ready, due → inflight; inflight: success, error, delay, dead on purpose, attempts spent
#[tokio::test]
async fn an_exception_that_is_tried_again() {
    let plain = installed(&database().await).await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(failed(&plain).await);
    }
    let waiting = plain.produce(1).await[0];
    let lease = plain.claim(1).await.unwrap();
    assert!(plain.fail(&lease, &[(waiting, "retry", Some(100.0))]).await);

    let (token, claimed) = plain.claim_exceptions(100, false).await;
    assert_eq!(claimed, ids, "only what is due");
    assert_eq!(plain.exception(ids[0]).await, "inflight a1 d0 l0 r0");
    assert!(plain.claim_exceptions(100, false).await.1.is_empty(), "claimed once");
    let verdicts = [
        (ids[0], "ok", None),
        (ids[1], "retry", Some(0.0)),
        (ids[2], "delay", Some(0.0)),
        (ids[3], "dead", None),
    ];
    assert!(plain.settle_exceptions(token, &verdicts).await.is_empty());
    assert_eq!(plain.exception(ids[0]).await, "gone");
    assert_eq!(plain.exception(ids[1]).await, "ready a2 d0 l0 r0");
    assert_eq!(plain.exception(ids[2]).await, "ready a1 d1 l0 r0");
    assert_eq!(plain.exception(ids[3]).await, "dead a2 d0 l0 r0");

    // Attempts 3 and 4 fail, and the fifth is the last.
    for attempts in 3..=5 {
        let (token, claimed) = plain.claim_exceptions(100, false).await;
        assert!(claimed.contains(&ids[1]));
        let verdicts: Vec<_> = claimed
            .iter()
            .map(|id| (*id, if *id == ids[1] { "retry" } else { "delay" }, Some(0.0)))
            .collect();
        assert!(plain.settle_exceptions(token, &verdicts).await.is_empty());
        let state = if attempts < 5 { "ready" } else { "dead" };
        assert_eq!(plain.exception(ids[1]).await, format!("{state} a{attempts} d0 l0 r0"));
    }
    assert_eq!(plain.exception(ids[2]).await, "ready a1 d4 l0 r0", "delays are no attempts");
}

/// Handed back: due at once, nothing counted.
#[tokio::test]
async fn an_exception_that_is_handed_back() {
    let plain = installed(&database().await).await;
    let id = failed(&plain).await;
    let (token, _) = plain.claim_exceptions(10, false).await;
    assert!(plain.release_exceptions(token, &[id]).await.is_empty());
    assert_eq!(plain.exception(id).await, "ready a1 d0 l0 r0");
    let (token, claimed) = plain.claim_exceptions(10, false).await;
    assert_eq!(claimed, [id]);
    plain.expire_exceptions().await;
    assert!(plain.extend_exceptions(token, &[id]).await.is_empty(), "still its owner's");
    assert!(plain.claim_exceptions(10, true).await.1.is_empty(), "and extended");
}

/// dead: redrive, redriving twice, dying again, discard
#[tokio::test]
async fn tb_091_a_dead_letter_is_redriven_dies_again_and_is_discarded() {
    let plain = installed(&database().await).await;
    let id = failed(&plain).await;
    let (token, _) = plain.claim_exceptions(10, false).await;
    plain.settle_exceptions(token, &[(id, "dead", None)]).await;
    assert_eq!(plain.exception(id).await, "dead a2 d0 l0 r0");
    assert_eq!(plain.redrive(&[id]).await, [id]);
    assert_eq!(plain.exception(id).await, "ready a0 d0 l0 r1");
    assert!(plain.redrive(&[id]).await.is_empty(), "redriving twice is harmless");
    assert!(plain.discard(&[id]).await.is_empty(), "what is not dead cannot be discarded");
    assert_eq!(plain.exception(id).await, "ready a0 d0 l0 r1");
    plain.db.batch_execute("UPDATE sqlstreams.consumer_group SET max_attempts = 1").await.unwrap();
    let (token, claimed) = plain.claim_exceptions(10, false).await;
    assert_eq!(claimed, [id]);
    plain.settle_exceptions(token, &[(id, "retry", None)]).await;
    assert_eq!(plain.exception(id).await, "dead a1 d0 l0 r1");
    let history: String = plain
        .db
        .query_one("SELECT string_agg(h->>'outcome', ' ' ORDER BY n) FROM sqlstreams.exception_queue_1, jsonb_array_elements(history) WITH ORDINALITY AS x(h, n)", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(history, "retry dead redriven dead");
    assert_eq!(plain.discard(&[id]).await, [id]);
    assert_eq!(plain.exception(id).await, "gone");
    assert!(plain.discard(&[id]).await.is_empty());
    let audited = "SELECT count(*) FROM sqlstreams.audit WHERE action IN ('redrive', 'discard') AND detail->'ids' @> to_jsonb($1::bigint)";
    let rows: i64 = plain.db.query_one(audited, &[&id]).await.unwrap().get(0);
    assert_eq!(rows, 2, "one redrive and one discard");
}

/// TB-090: ten sessions redrive the same dead letters at once; each is back once.
#[tokio::test(flavor = "multi_thread")]
async fn tb_090_redriving_at_once_from_many_sessions() {
    let url = database().await;
    let plain = installed(&url).await;
    let ids = plain.produce(500).await;
    let lease = plain.claim(500).await.unwrap();
    let dead: Vec<_> = ids.iter().map(|id| (*id, "dead", None)).collect();
    assert!(plain.fail(&lease, &dead).await);
    let mut sessions = Vec::new();
    for _ in 0..10 {
        sessions.push(plain.again(&url).await);
    }
    let all = futures_util::future::join_all(sessions.iter().map(|s| s.redrive(&ids))).await;
    let mut redriven: Vec<i64> = all.into_iter().flatten().collect();
    redriven.sort_unstable();
    assert_eq!(redriven, ids);
    assert_eq!(count(&plain.db, "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'ready' AND redrives = 1").await, 500);
}

/// inflight, lease expired → a suspect: claimed alone, and only a loss while alone counts.
#[tokio::test]
async fn a_loss_makes_a_suspect_and_counts_only_when_it_was_alone() {
    let plain = installed(&database().await).await;
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(failed(&plain).await);
    }
    let (_, claimed) = plain.claim_exceptions(100, false).await;
    assert_eq!(claimed, ids);
    plain.expire_exceptions().await;
    assert!(
        plain.claim_exceptions(100, false).await.1.is_empty(),
        "suspects are no part of a batch"
    );
    for id in &ids {
        assert_eq!(
            plain.exception(*id).await,
            "ready a1 d0 l1 r0",
            "a loss in company is no attempt"
        );
    }
    // Alone, whatever the limit.
    let (token, alone) = plain.claim_exceptions(100, true).await;
    assert_eq!(alone.len(), 1);
    let suspect = alone[0];
    // It ran to an end: an ordinary failure, and no suspect any more.
    assert!(plain.settle_exceptions(token, &[(suspect, "retry", Some(0.0))]).await.is_empty());
    assert_eq!(plain.exception(suspect).await, "ready a2 d0 l0 r0");
    assert_eq!(plain.claim_exceptions(100, false).await.1, [suspect]);
    // The next one is lost while alone, again and again.
    let (_, alone) = plain.claim_exceptions(100, true).await;
    let killer = alone[0];
    for attempts in 2..=5 {
        plain
            .db
            .execute(
                &format!(
                    "UPDATE {} SET lease_expires_at = '-infinity' WHERE message_id = $1",
                    plain.exceptions()
                ),
                &[&killer],
            )
            .await
            .unwrap();
        assert!(plain.claim_exceptions(100, false).await.1.is_empty());
        let state = if attempts < 5 { "ready" } else { "dead" };
        let losses = attempts;
        assert_eq!(plain.exception(killer).await, format!("{state} a{attempts} d0 l{losses} r0"));
        if attempts == 5 {
            break;
        }
        // It is due after a backoff; the others wait in front of it.
        plain.db.execute(&format!("UPDATE {} SET due_at = clock_timestamp() - interval '1 hour' WHERE message_id = $1", plain.exceptions()), &[&killer]).await.unwrap();
        assert_eq!(plain.claim_exceptions(100, true).await.1, [killer]);
    }
}

/// TB-078, TB-081: one message of a thousand kills every process that holds it.
#[tokio::test]
async fn tb_078_a_killer_message_dies_alone_and_its_neighbours_are_handled_once() {
    const KILLER: i64 = 500;
    let plain = installed(&database().await).await;
    let ids = plain.produce(1000).await;
    plain
        .db
        .batch_execute("UPDATE sqlstreams.consumer_group SET backoff_base = '0'")
        .await
        .unwrap();
    let (mut kills, mut handled) = (0, std::collections::BTreeMap::<i64, u32>::new());
    let mut log_has_more = true;
    // A process: claims, and dies before it has settled anything if the killer is among it.
    for _ in 0..3000 {
        // Once the range has become suspects there is nothing more in the log.
        let lease = if log_has_more { plain.claim(1000).await } else { None };
        log_has_more = lease.is_some();
        if let Some(lease) = lease {
            let got = plain.fetch(&lease).await;
            if got.contains(&KILLER) {
                kills += 1;
                plain.expire_leases().await;
                continue;
            }
            got.iter().for_each(|id| *handled.entry(*id).or_default() += 1);
            assert!(plain.settle(&lease, "{(,)}").await);
            continue;
        }
        let (mut token, mut got) = plain.claim_exceptions(500, true).await;
        if got.is_empty() {
            (token, got) = plain.claim_exceptions(500, false).await;
        }
        if got.contains(&KILLER) {
            assert_eq!(got, [KILLER], "it has company, and takes that with it");
            kills += 1;
            plain.expire_exceptions().await;
            continue;
        }
        got.iter().for_each(|id| *handled.entry(*id).or_default() += 1);
        let verdicts: Vec<_> = got.iter().map(|id| (*id, "ok", None)).collect();
        assert!(plain.settle_exceptions(token, &verdicts).await.is_empty());
        if got.is_empty() && plain.exception(KILLER).await.starts_with("dead") {
            break;
        }
    }
    // Three deliveries with its range (max_reclaims 2), then max_attempts alone.
    assert_eq!(kills, 3 + 5);
    assert!(
        plain.exception(KILLER).await.starts_with("dead a5"),
        "{}",
        plain.exception(KILLER).await
    );
    assert_eq!(handled.len(), ids.len() - 1);
    assert!(handled.values().all(|times| *times == 1), "a neighbour was handled twice");
    assert_eq!(count(&plain.db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 1);
}

/// A poison range leaves many suspects; that they run alone must not make them wait for each other's polls.
#[tokio::test(flavor = "multi_thread")]
async fn suspects_are_drained_one_after_the_other_without_pauses() {
    let (client, db) = client().await;
    let stream = numbers(&client, "poison", 300).await;
    let group = stream.group("g").create().await.unwrap();
    let plain = Plain { db, stream: stream.id(), group: group.id() };
    for _ in 0..3 {
        assert!(plain.claim(300).await.is_some());
        plain.expire_leases().await;
    }
    let mut took = Vec::new();
    // As many that come one by one because their group is limited.
    for group in [stream.group("g"), stream.group("one by one").max_in_flight(1)] {
        let started = std::time::Instant::now();
        let consumer = group.consumer().until_caught_up();
        let consumed = consumer.run(async |_: sqlstreams::Delivery<u64>| {}).await.unwrap();
        assert_eq!(consumed.handled, 300);
        took.push(started.elapsed());
    }
    println!("300 suspects, and 300 one by one: {took:?}");
    assert!(took[0] < took[1] * 5, "{took:?}");
}

/// Two calls that name the same rows in opposite orders; without one order of locks the server ends one of them (40P01).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_name_the_same_exceptions_do_not_deadlock() {
    let url = database().await;
    let one = installed(&url).await;
    let other = one.again(&url).await;
    one.produce(300).await;
    let lease = one.claim(300).await.unwrap();
    let failed: Vec<_> =
        one.fetch(&lease).await.iter().map(|id| (*id, "retry", Some(0.0))).collect();
    assert!(one.fail(&lease, &failed).await);
    for _ in 0..30 {
        one.all_due().await;
        let (token, ids) = one.claim_exceptions(300, false).await;
        assert_eq!(ids.len(), 300);
        let back: Vec<_> = ids.iter().rev().map(|id| (*id, "delay", Some(0.0))).collect();
        tokio::join!(one.release_exceptions(token, &ids), other.settle_exceptions(token, &back));
    }
}
