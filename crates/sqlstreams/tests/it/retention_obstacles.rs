//! What is in the way of retention beside readers and groups: another that does the same, and what users have made of a partition, and the minute for which
//! each stays.

use std::time::{Duration, SystemTime};

use sqlstreams::{HoldReason, Retention, RetentionHold};

use crate::retention::{Scene, hour, scene};
use crate::support::{connect, count, eventually};

/// Messages that have been handled, in partitions that are old and may go: one for each thousand of them.
async fn old(messages: i64) -> Scene {
    let scene = scene(hour()).await;
    scene.fill(messages).await;
    scene.consume("a").await;
    scene.a_day_later().await;
    scene
}

async fn hold(scene: &Scene) -> Option<RetentionHold> {
    scene.stream.info().await.unwrap().hold
}

/// Whoever has the stream's row for as long as this tries is named, whatever lock it has, and however many they are.
#[tokio::test(flavor = "multi_thread")]
async fn another_that_has_the_stream_in_hand_is_named() {
    let scene = old(2_500).await;
    let begun = SystemTime::now() - Duration::from_secs(60);
    let lock = |what: &str| {
        format!(
            "BEGIN; SET LOCAL application_name = 'other'; SELECT FROM sqlstreams.stream WHERE id = 1 FOR {what}"
        )
    };
    for locks in [&["UPDATE"][..], &["KEY SHARE"], &["KEY SHARE", "KEY SHARE"]] {
        let mut others = Vec::new();
        for what in locks {
            let other = connect(&scene.url).await;
            other.batch_execute(&lock(what)).await.unwrap();
            others.push(other);
        }
        let first = count(&others[0], "SELECT pg_backend_pid()::bigint").await;
        let done = scene.stream.retain().await.unwrap();
        assert_eq!((done.partitions, done.waiting), (0, true), "{locks:?}");
        let busy = done.busy.unwrap();
        let by = busy.by.unwrap();
        assert!(by.starts_with(&format!("process {first} (other, ")), "{locks:?}: {by}");
        assert!((begun..=SystemTime::now()).contains(&busy.since.unwrap()), "{locks:?}");
        for other in others {
            other.batch_execute("COMMIT").await.unwrap();
        }
    }
    // Another has the partition that is copied.
    let sql = "SELECT sqlstreams.retire_partitions(1)";
    scene.db.batch_execute(sql).await.unwrap();
    let other = connect(&scene.url).await;
    let lock = "BEGIN; SELECT FROM sqlstreams.log_partition WHERE stream_id = 1 FOR UPDATE";
    other.batch_execute(lock).await.unwrap();
    let pid = count(&other, "SELECT pg_backend_pid()::bigint").await;
    let by = scene.stream.retain().await.unwrap().busy.unwrap().by.unwrap();
    assert!(by.starts_with(&format!("process {pid}")), "{by}");
    // Nobody: nothing is said, and it is done.
    other.batch_execute("COMMIT").await.unwrap();
    scene.let_go(2).await;
    assert_eq!(scene.stream.retain().await.unwrap().busy, None);
}

/// A view keeps the table of its partition, and nothing else: the others go, also those of other streams, and whoever looks is told.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_made_of_a_partition_keeps_that_alone() {
    let scene = old(12_500).await;
    // More than are looked at in one step, the first ones.
    for n in 0..9 {
        let view =
            format!("CREATE VIEW public.of_{n} AS SELECT id FROM sqlstreams.message_log_1_p{n}");
        scene.db.batch_execute(&view).await.unwrap();
    }
    scene.let_go(3).await;
    eventually(async || {
        scene.stream.retain().await.unwrap();
        scene.partitions().await[0] == 12 && scene.strays().await == 9
    })
    .await;
    let kept = "SELECT count(*) FROM sqlstreams.log_partition WHERE kept_by IS NOT NULL";
    eventually(async || {
        scene.stream.retain().await.unwrap();
        count(&scene.db, kept).await == 9
    })
    .await;
    // It is told, and no failure: with it nothing else would be done for a while.
    let told = hold(&scene).await.unwrap();
    assert_eq!((told.reason, &told.group), (HoldReason::Depends, &None));
    let detail = told.detail.unwrap();
    assert!(detail.contains("view public.of_0 depends on table message_log_1_p0"), "{detail}");
    let done = scene.stream.retain().await.unwrap();
    assert_eq!((done.partitions, done.waiting, done.busy), (0, true, None));
    let status = scene.client.maintenance().once().await.unwrap();
    assert!(status.held);
    let status = scene.client.maintenance().status().await.unwrap();
    assert_eq!(status.failures, []);
    let holds: Vec<_> = status.holds.iter().map(|h| (h.stream.as_str(), h.hold.reason)).collect();
    assert_eq!(holds, [("s", HoldReason::Depends)]);
    // The views are there, the space is not.
    for n in 0..9 {
        let rows = format!("SELECT count(*) FROM public.of_{n}");
        assert_eq!(count(&scene.db, &rows).await, 0);
        let bytes = format!("SELECT pg_relation_size('sqlstreams.message_log_1_p{n}')");
        assert_eq!(count(&scene.db, &bytes).await, 0);
    }

    // Messages that come later go when they are old, beside those.
    scene.fill(2_000).await;
    scene.consume("a").await;
    scene.a_day_later().await;
    scene.let_go(2).await;
    // Where a group holds something back, both are told.
    scene.fill(2_000).await;
    scene.a_day_later().await;
    scene.stream.retain().await.unwrap();
    let both = hold(&scene).await.unwrap();
    assert_eq!((both.reason, both.group.as_deref()), (HoldReason::Group, Some("a")));
    assert!(both.detail.unwrap().contains("view public.of_0"));
    scene.consume("a").await;

    // One that is dropped lets its partition go, whichever it is.
    scene.db.batch_execute("DROP VIEW public.of_8").await.unwrap();
    scene.let_go(3).await;
    assert_eq!(count(&scene.db, kept).await, 8);
    for n in 0..8 {
        scene.db.batch_execute(&format!("DROP VIEW public.of_{n}")).await.unwrap();
    }
    scene.let_go(8).await;
    assert_eq!((scene.strays().await, hold(&scene).await), (0, None));
}

/// Whatever the limits say: a producer whose connection broke asks for a minute what became of its messages.
#[tokio::test]
async fn a_partition_that_is_full_stays_for_a_minute() {
    for keep in [Retention::forever().until_resolved(), Retention::forever().keep_count(1)] {
        let scene = scene(keep).await;
        scene.fill(2_500).await;
        scene.consume("a").await;
        scene.seal(true).await;
        let due = "SELECT count(*) FROM sqlstreams.retention_due(ARRAY[(1, 2500, 1000)::sqlstreams.stream_head])";
        for age in [0, 40] {
            let sql = format!(
                "UPDATE sqlstreams.log_partition SET sealed_at = now() - interval '{age} seconds' WHERE sealed_at IS NOT NULL"
            );
            scene.db.batch_execute(&sql).await.unwrap();
            assert_eq!(scene.stream.retain().await.unwrap().partitions, 0, "after {age} s");
            assert_eq!(count(&scene.db, due).await, 0, "after {age} s");
        }
        let sql = "UPDATE sqlstreams.log_partition SET sealed_at = now() - interval '61 seconds' WHERE sealed_at IS NOT NULL";
        scene.db.batch_execute(sql).await.unwrap();
        assert_eq!(count(&scene.db, due).await, 1);
        scene.let_go(2).await;
    }
}
