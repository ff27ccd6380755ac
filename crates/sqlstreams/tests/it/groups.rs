//! Groups know nothing of each other: failures, dead letters and redrives of one are invisible to the others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{Delivery, Outcome, RetryPolicy};

use crate::plain::{Plain, create_group, installed};
use crate::support::{client, connect, count, database, numbers};

#[tokio::test]
async fn what_one_group_does_changes_nothing_of_another() {
    let url = database().await;
    let busy = installed(&url).await;
    let group = create_group(&busy.db, busy.stream, "h").await;
    let quiet = Plain { db: connect(&url).await, stream: busy.stream, group };
    let ids = busy.produce(20).await;
    // The other group has a lease, a failure and a dead letter of its own, of the same messages.
    let lease = quiet.claim(10).await.unwrap();
    assert!(quiet.fail(&lease, &[(ids[0], "retry", Some(100.0)), (ids[1], "dead", None)]).await);
    let before = quiet.state().await;

    let lease = busy.claim(20).await.unwrap();
    let failed: Vec<_> =
        ids.iter().map(|id| (*id, if id % 2 == 0 { "dead" } else { "retry" }, Some(0.0))).collect();
    assert!(busy.fail(&lease, &failed).await);
    let (token, claimed) = busy.claim_exceptions(100, false).await;
    assert_eq!(claimed.len(), 10);
    busy.settle_exceptions(token, &[(claimed[0], "ok", None), (claimed[1], "dead", None)]).await;
    busy.expire_exceptions().await;
    let (suspect, claimed) = busy.claim_exceptions(100, true).await;
    busy.settle_exceptions(suspect, &[(claimed[0], "retry", None)]).await;
    assert_eq!(busy.redrive(&ids).await.len(), 11);
    let (token, claimed) = busy.claim_exceptions(100, false).await;
    assert!(claimed.len() >= 10);
    let dead: Vec<_> = claimed.iter().map(|id| (*id, "dead", None)).collect();
    busy.settle_exceptions(token, &dead).await;
    assert_eq!(busy.discard(&ids).await.len(), claimed.len());
    // With the other's tokens and numbers, too.
    let foreign: Vec<uuid::Uuid> = quiet
        .db
        .query(
            &format!("SELECT token FROM {} WHERE group_id = $1", quiet.leases()),
            &[&quiet.group],
        )
        .await
        .unwrap()
        .iter()
        .map(|r| r.get(0))
        .collect();
    let stolen = crate::plain::Lease { seq: 1, token: foreign[0], pending: "{[1,11)}".into() };
    assert!(!busy.settle(&stolen, "{(,)}").await);
    assert!(busy.fetch(&stolen).await.is_empty());
    busy.db
        .query_one("SELECT sqlstreams.drop_group($1, $2)", &[&busy.stream, &busy.group])
        .await
        .unwrap();

    assert_eq!(quiet.state().await, before);
    assert_eq!(quiet.exception(ids[0]).await, "ready a1 d0 l0 r0");
    assert_eq!(quiet.exception(ids[1]).await, "dead a1 d0 l0 r0");
}

/// TB-093: three groups at once, two of them in trouble; each message succeeds or dies in each on its own account.
#[tokio::test(flavor = "multi_thread")]
async fn tb_093_groups_in_trouble_and_one_that_is_not() {
    const MESSAGES: u64 = 4_000;
    let (client, db) = client().await;
    let stream = numbers(&client, "shared", MESSAGES).await;
    let policy = RetryPolicy::attempts(3).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    let runs: Arc<Mutex<BTreeMap<(&str, u64), u32>>> = Arc::default();
    let run = |name: &'static str, bad: u64| {
        let (runs, stream) = (runs.clone(), stream.clone());
        async move {
            let group = stream.group(name).retry(policy).create().await.unwrap();
            let consume = || {
                let runs = runs.clone();
                group.consumer().until_caught_up().run(move |message: Delivery<u64>| {
                    *runs.lock().unwrap().entry((name, message.payload)).or_default() += 1;
                    let outcome = match message.payload % 10 {
                        n if n == bad => Outcome::Retry("always".into()),
                        n if n == bad + 1 => Outcome::Dead("at once".into()),
                        _ => Outcome::Done,
                    };
                    async move { outcome }
                })
            };
            let (one, two) = tokio::join!(consume(), consume());
            one.unwrap();
            two.unwrap();
            while bad < 10 && !group.redrive(None, 100).await.unwrap().is_empty() {}
            consume().await.unwrap();
            group
        }
    };
    let (a, b, clean) = tokio::join!(run("a", 0), run("b", 5), run("clean", 100));
    let runs = std::mem::take(&mut *runs.lock().unwrap());
    for n in 0..MESSAGES {
        for (name, bad) in [("a", 0), ("b", 5), ("clean", 100)] {
            // Three attempts and, after the redrive, three more; dead at once and once more.
            let expected = match n % 10 {
                last if last == bad => 6,
                last if last == bad + 1 => 2,
                _ => 1,
            };
            assert_eq!(runs[&(name, n)], expected, "message {n} in group {name}");
        }
    }
    for (group, dead) in [(&a, 800), (&b, 800), (&clean, 0)] {
        let status = group.status().await.unwrap();
        assert_eq!((status.dead, status.ready, status.inflight), (dead, 0, 0), "{status:?}");
    }
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.message_log_1").await, MESSAGES as i64);
    let rows = "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE group_id = (SELECT id FROM sqlstreams.consumer_group WHERE name = 'clean')";
    assert_eq!(count(&db, rows).await, 0);
}
