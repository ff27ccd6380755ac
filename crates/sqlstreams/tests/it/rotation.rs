//! The rotated cursor under many sessions: ranges neither overlap nor leave a hole, whoever waits while it is replaced.

use std::time::{Duration, Instant};

use crate::plain::{ids_of, installed};
use crate::support::{count, database};

const SESSIONS: usize = 16;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sessions_that_claim_at_once_get_every_id_once() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(100_000).await;
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(plain.again(&url).await);
    }
    let end = Instant::now() + Duration::from_secs(4);
    let tasks: Vec<_> = sessions
        .into_iter()
        .enumerate()
        .map(|(number, session)| {
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(number as u64);
                let (mut got, mut held) = (Vec::new(), None);
                while Instant::now() < end {
                    let done: Vec<_> = held.iter().map(|lease| (lease, "{[1,)}")).collect();
                    // One in ten changes its mind: what it claimed goes to somebody else.
                    let undone = random.u32(0..10) == 0;
                    if undone {
                        session.db.batch_execute("BEGIN").await.unwrap();
                    }
                    let (lost, lease) = session.advance(&done, random.i64(1..20)).await;
                    assert!(lost.is_empty());
                    if undone {
                        session.db.batch_execute("ROLLBACK").await.unwrap();
                        continue;
                    }
                    let lease = lease.expect("there is plenty to claim");
                    got.extend(ids_of(&lease.pending));
                    held = Some(lease);
                }
                let done: Vec<_> = held.iter().map(|lease| (lease, "{[1,)}")).collect();
                session.advance(&done, 0).await;
                got
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.extend(task.await.unwrap());
    }
    all.sort_unstable();
    let claimed = plain.claimed().await;
    assert_eq!(all, (1..=claimed).collect::<Vec<_>>(), "every id up to the cursor, once");
    let cursor = "sqlstreams.consumer_group_cursor_1";
    let rotated = count(&plain.db, &format!("SELECT max(generation) FROM {cursor}")).await;
    println!("{claimed} ids claimed, {rotated} rotations");
    assert!(rotated >= 1, "the cursor was not rotated, so this run shows nothing");
    assert_eq!(count(&plain.db, &format!("SELECT count(*) FROM {cursor}")).await, 1);
    assert_eq!(count(&plain.db, &format!("SELECT count(*) FROM {}", plain.leases())).await, 0);
}
