//! Late commits and gaps, one at a time: the reports against other systems as tests (ids of the test bank).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::plain::{Lease, Plain, create_group, installed};
use crate::support::{connect, count, database};

/// Tx A inserts and stays open, tx B commits at once, groups poll all the time.
#[tokio::test(flavor = "multi_thread")]
async fn tb_001_a_lower_id_that_commits_later_is_waited_for() {
    let url = database().await;
    let plain = installed(&url).await;
    let other = create_group(&plain.db, plain.stream, "h").await;
    let before = plain.produce(3).await;

    let a = plain.again(&url).await;
    a.db.batch_execute("BEGIN").await.unwrap();
    let late = a.produce(1).await;
    let after = plain.produce(5).await;

    let ended = Arc::new(AtomicBool::new(false));
    let mut pollers = Vec::new();
    for group in [plain.group, other] {
        let poller = Plain { db: connect(&url).await, stream: plain.stream, group };
        pollers.push(tokio::spawn(poll(poller, late[0], ended.clone())));
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    ended.store(true, Ordering::SeqCst);
    a.db.batch_execute("COMMIT").await.unwrap();
    for poller in pollers {
        assert_eq!(poller.await.unwrap(), [&before[..], &late, &after].concat());
    }
}

/// Everything the group gets, in order, until nothing is left.
async fn poll(plain: Plain, late: i64, ended: Arc<AtomicBool>) -> Vec<i64> {
    let mut got = Vec::new();
    let head = count(&plain.db, "SELECT sqlstreams.stream_head(1)").await;
    loop {
        let lease = plain.claim(100).await;
        let claimed = plain.claimed().await;
        assert!(claimed < late || ended.load(Ordering::SeqCst), "the cursor passed an open id");
        if let Some(lease) = lease {
            got.extend(plain.fetch(&lease).await);
            assert!(plain.settle(&lease, "{[1,)}").await);
        }
        if claimed >= head {
            return got;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Ids burnt by a rollback, and by a backend that was terminated.
#[tokio::test]
async fn tb_004_a_gap_that_nobody_will_fill_is_stepped_over_by_the_next_claim() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.burn(10).await;
    let doomed = plain.again(&url).await;
    doomed.db.batch_execute("BEGIN").await.unwrap();
    doomed.produce(10).await;
    let pid = count(&doomed.db, "SELECT pg_backend_pid()::bigint").await;
    plain.db.execute("SELECT pg_terminate_backend($1::bigint::int, 10000)", &[&pid]).await.unwrap();
    let produced = plain.produce(5).await;

    // One call is enough: nobody runs who could fill the gap.
    let lease = plain.claim(100).await.expect("the gap is stepped over");
    assert_eq!(plain.fetch(&lease).await, produced);
    assert!(plain.settle(&lease, "{[1,)}").await);

    // Ids burnt at the end are passed as well, or the group would never count as caught up.
    plain.burn(10).await;
    plain.let_look().await;
    assert_eq!(plain.claim(100).await, None);
    assert_eq!(plain.claimed().await, count(&plain.db, "SELECT sqlstreams.stream_head(1)").await);
}

/// A producer that holds its transaction longer than anything in the code remembers: the fence's row is rotated thrice.
#[tokio::test]
async fn tb_006_a_transaction_longer_than_any_window_is_still_delivered() {
    let url = database().await;
    let plain = installed(&url).await;
    let slow = plain.again(&url).await;
    slow.db.batch_execute("BEGIN").await.unwrap();
    let late = slow.produce(1).await;
    let mut expected = late.clone();
    for _ in 0..3 {
        // As after so many looks, without the wait.
        plain.db.batch_execute("UPDATE sqlstreams.stream_fence SET updates = 199").await.unwrap();
        for _ in 0..4 {
            expected.extend(plain.produce(20).await);
            plain.burn(2).await;
            plain.let_look().await;
            assert_eq!(plain.claim(100).await, None, "the open id is waited for");
        }
    }
    let generation = count(&plain.db, "SELECT max(generation) FROM sqlstreams.stream_fence").await;
    assert!(generation >= 3, "the fence's row was rotated only {generation} times");
    slow.db.batch_execute("COMMIT").await.unwrap();

    let mut got = Vec::new();
    while plain.claimed().await < *expected.last().unwrap() {
        if let Some(lease) = plain.claim(50).await {
            got.extend(plain.fetch(&lease).await);
            assert!(plain.settle(&lease, "{[1,)}").await);
        }
        plain.let_look().await;
    }
    assert_eq!(got, expected);
}

/// Acks for 1 and 3 never stand for 2.
#[tokio::test]
async fn tb_007_what_was_not_settled_comes_again_and_nothing_else() {
    let url = database().await;
    let plain = installed(&url).await;
    let ids = plain.produce(3).await;
    let lease: Lease = plain.claim(3).await.unwrap();
    assert!(plain.settle(&lease, &format!("{{[{0},{0}]}}", ids[2])).await);
    assert!(plain.settle(&lease, &format!("{{[{0},{0}]}}", ids[0])).await);
    plain.expire_leases().await;
    let again = plain.claim(10).await.unwrap();
    assert_eq!(plain.fetch(&again).await, [ids[1]]);
    assert!(plain.settle(&again, "{[1,)}").await);
    assert_eq!(plain.claim(10).await, None);
}
