//! Tokens: who lost a lease can change nothing with it, not even after a crash that made its number come again.

use std::time::Duration;

use sqlstreams_dev::Cluster;

use crate::plain::{Lease, Plain, ids_of, installed};
use crate::support::{connect, database};

/// Everything a zombie can try with a lease; all of it must be refused and change nothing.
async fn refused_everything(zombie: &Plain, lease: &Lease) {
    let before = zombie.state().await;
    let ids: Vec<i64> = ids_of(&lease.pending).into_iter().collect();
    let (lost, none) = zombie.advance(&[(lease, &lease.pending)], 0).await;
    assert_eq!((lost, none), (vec![lease.token], None), "advance");
    let failed: Vec<_> = ids.iter().map(|id| (lease.token, (*id, "dead", None))).collect();
    let (lost, _) = zombie.try_advance(&[(lease, "{}")], &failed, 0).await.unwrap();
    assert_eq!(lost, [lease.token], "advance with failures");
    assert!(!zombie.settle(lease, &lease.pending).await, "settle");
    assert!(!zombie.settle(lease, "{}").await, "settle of nothing");
    let failed: Vec<_> = ids.iter().map(|id| (*id, "retry", Some(0.0))).collect();
    assert!(!zombie.fail(lease, &failed).await, "fail");
    assert_eq!(zombie.extend(&[(lease, &lease.pending)]).await, [None], "extend");
    assert_eq!(zombie.release(&[(lease, "{}")]).await, [lease.token], "release");
    assert!(zombie.fetch(lease).await.is_empty(), "fetch");
    assert_eq!(zombie.state().await, before, "a zombie changed something");
}

#[tokio::test]
async fn a_late_consumer_is_refused_and_changes_nothing() {
    let url = database().await;
    let zombie = installed(&url).await;
    let other = zombie.again(&url).await;
    zombie.produce(10).await;

    // Taken over after it ran out.
    let old = zombie.claim(10).await.unwrap();
    zombie.expire_leases().await;
    let new = other.claim(10).await.unwrap();
    assert_eq!(new.pending, old.pending);
    assert_ne!(new.token, old.token);
    refused_everything(&zombie, &old).await;
    // Guessing the other's seq does not help.
    refused_everything(&zombie, &Lease { seq: new.seq, ..old.clone() }).await;

    // Handed back, and not taken by anyone yet.
    assert!(other.release(&[(&new, "{[1,3)}")]).await.is_empty());
    refused_everything(&other, &new).await;
    let third = zombie.claim(100).await.unwrap();
    assert_eq!(third.pending, "{[3,11)}");

    // Settled in full.
    assert!(zombie.settle(&third, "{[1,)}").await);
    refused_everything(&zombie, &third).await;
}

/// Ran out, yet nobody has taken it: the owner may still settle.
#[tokio::test]
async fn a_lease_that_ran_out_is_its_owners_until_somebody_takes_it() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(10).await;
    let lease = plain.claim(10).await.unwrap();
    plain.expire_leases().await;
    assert_eq!(plain.extend(&[(&lease, "{[1,4)}")]).await, [Some(lease.seq)]);
    assert_eq!(plain.again(&url).await.claim(10).await, None, "extended, so not to be had");
    plain.expire_leases().await;
    assert!(plain.settle(&lease, "{[1,)}").await);
    assert_eq!(plain.claim(10).await, None);
}

#[tokio::test]
async fn splitting_a_lapsed_lease_fences_its_owner_off_both_halves() {
    let url = database().await;
    let zombie = installed(&url).await;
    let other = zombie.again(&url).await;
    zombie.produce(100).await;
    let old = zombie.claim(100).await.unwrap();
    zombie.expire_leases().await;
    let half = other.claim(40).await.unwrap();
    assert_eq!(half.pending, "{[1,41)}");
    refused_everything(&zombie, &old).await;
    for part in ["{[1,41)}", "{[41,101)}"] {
        refused_everything(&zombie, &Lease { pending: part.into(), ..old.clone() }).await;
    }
    let rest = other.claim(1000).await.unwrap();
    assert_eq!(rest.pending, "{[41,101)}");
    assert!(other.settle(&half, "{[1,)}").await && other.settle(&rest, "{[1,)}").await);
    refused_everything(&zombie, &old).await;
}

#[tokio::test]
async fn a_settlement_touches_only_what_its_lease_holds() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(20).await;
    let (first, second) = (plain.claim(10).await.unwrap(), plain.claim(10).await.unwrap());
    // Everything named, and ids named that are someone else's or nobody's.
    assert!(plain.fail(&first, &[(15, "dead", None), (99, "dead", None), (5, "dead", None)]).await);
    assert!(plain.settle(&first, "{(,)}").await);
    assert_eq!(plain.exception(15).await, "gone");
    assert_eq!(plain.exception(99).await, "gone");
    assert!(plain.exception(5).await.starts_with("dead"));
    assert_eq!(plain.fetch(&second).await, (11..=20).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_late_consumer_of_exceptions_is_refused_and_changes_nothing() {
    let url = database().await;
    let zombie = installed(&url).await;
    let other = zombie.again(&url).await;
    let ids = zombie.produce(3).await;
    let lease = zombie.claim(3).await.unwrap();
    let failed: Vec<_> = ids.iter().map(|id| (*id, "retry", Some(0.0))).collect();
    assert!(zombie.fail(&lease, &failed).await);
    let (old, claimed) = zombie.claim_exceptions(10, false).await;
    assert_eq!(claimed, ids);
    zombie.expire_exceptions().await;
    let mut tokens = Vec::new();
    // Lapsed, they are suspects: one at a time.
    for _ in &ids {
        let (token, claimed) = other.claim_exceptions(10, true).await;
        assert_eq!(claimed.len(), 1);
        tokens.push((token, claimed[0]));
    }
    let before = zombie.state().await;
    for outcome in ["ok", "retry", "dead", "delay"] {
        let verdicts: Vec<_> = ids.iter().map(|id| (*id, outcome, None)).collect();
        assert_eq!(zombie.settle_exceptions(old, &verdicts).await, ids, "{outcome}");
    }
    assert_eq!(zombie.extend_exceptions(old, &ids).await, ids);
    assert_eq!(zombie.release_exceptions(old, &ids).await, ids);
    assert_eq!(zombie.state().await, before, "a zombie changed something");
    for (token, id) in tokens {
        assert!(other.settle_exceptions(token, &[(id, "ok", None)]).await.is_empty());
    }
}

/// Claims commit asynchronously, so a crash takes some back, and the numbers of their leases come again.
#[tokio::test(flavor = "multi_thread")]
async fn a_number_that_repeats_after_a_crash_does_not_let_a_zombie_in() {
    let start = || {
        // So that what is not flushed at commit stays so for a while.
        Cluster::builder().durable(true).setting("wal_writer_delay", "10s").start().unwrap()
    };
    let cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let url = cluster.url("postgres");
    let mut zombie = installed(&url).await;
    zombie.produce(10).await;
    let mut repeated = false;
    let mut cluster = Some(cluster);
    for _ in 0..5 {
        let claim = async |plain: &Plain| {
            plain.db.batch_execute("BEGIN; SET LOCAL synchronous_commit = off").await.unwrap();
            let lease = plain.claim(10).await;
            plain.db.batch_execute("COMMIT").await.unwrap();
            lease
        };
        let old = claim(&zombie).await.expect("nothing is settled, so there is something to claim");
        let crashing = cluster.take().unwrap();
        let crash = move || {
            crashing.kill().unwrap();
            crashing.start_again().unwrap();
            crashing
        };
        cluster = Some(tokio::task::spawn_blocking(crash).await.unwrap());
        zombie.db = connect(&url).await;
        let new = Plain { db: connect(&url).await, ..zombie }.claim(10).await;
        zombie = Plain { db: connect(&url).await, stream: 1, group: zombie.group };
        match new {
            Some(new) => {
                assert_eq!((new.seq, &new.pending), (old.seq, &old.pending), "the claim was lost");
                assert_ne!(new.token, old.token);
                refused_everything(&zombie, &old).await;
                assert!(
                    zombie.settle(&new, "{[1,)}").await,
                    "its owner is not in the way of itself"
                );
                repeated = true;
                break;
            }
            // The claim had reached the disk after all; give it back and try again.
            None => assert!(zombie.release(&[(&old, "{}")]).await.is_empty()),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(repeated, "no crash took a claim back, so this run shows nothing");
}
