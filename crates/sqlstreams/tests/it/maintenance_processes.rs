//! The holder of the maintenance lease killed and frozen, as a process: another goes on, and whoever comes back does no harm.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use sqlstreams::{Client, Missed, Outgoing};

use crate::child::Process;
use crate::journal::Script;
use crate::scene::Scene;
use crate::support::{count, until};

/// So long a successor may take, on a slow machine: the lease is 10 s.
const LIMIT: Duration = Duration::from_secs(60);

/// A stream with a consumer's group, a schedule that fires each second and misses nothing, and a stream that needs partitions.
async fn scene() -> Scene {
    let scene = Scene::new("kept", 1, Duration::from_secs(60)).await;
    let client = Client::connect(&scene.place.url).await.unwrap();
    let jobs = client.stream::<u64>("jobs").create().await.unwrap();
    let every = client.schedule("tick").cron("* * * * * *").missed(Missed::All).catch_up(1_000);
    every.produce(&jobs, Outgoing::new(&1)).create().await.unwrap();
    client.stream::<u64>("grows").partition_size(1_000).create().await.unwrap();
    scene
}

/// Who holds the lease: the process, as it calls itself, and the lease's holder.
async fn holder(scene: &Scene) -> Option<(String, String)> {
    let sql = "SELECT name, holder::text FROM sqlstreams.maintenance WHERE until > clock_timestamp() ORDER BY generation DESC LIMIT 1";
    let row = scene.db.query_opt(sql, &[]).await.unwrap()?;
    Some((row.get(0), row.get(1)))
}

/// Waits until this process holds it; returns its holder.
async fn held_by(scene: &Scene, process: &Process) -> String {
    let number = process.id().to_string();
    let mut found = None;
    until("it holds the lease", LIMIT, async || {
        found = holder(scene).await.filter(|(name, _)| name.contains(&number)).map(|h| h.1);
        found.is_some()
    })
    .await;
    found.unwrap()
}

/// So many ids of the stream that grows are drawn: whoever does the upkeep makes partitions.
async fn grow(scene: &Scene, upto: i64) {
    let sql = format!(
        "SELECT setval('sqlstreams.message_log_3_id_seq', {upto}); UPDATE sqlstreams.stream_pace SET head = {upto} WHERE stream_id = 3"
    );
    scene.db.batch_execute(&sql).await.unwrap();
}

async fn grown(scene: &Scene, upto: i64) -> bool {
    let sql = "SELECT max(number) FROM sqlstreams.log_partition WHERE stream_id = 3";
    count(&scene.db, sql).await >= upto / 1_000 + 3
}

/// How often the schedule has fired at each of its times, in seconds since 1970.
async fn ticks(scene: &Scene) -> BTreeMap<i64, i64> {
    let sql = "SELECT extract(epoch FROM (headers->>'fire_time')::timestamptz)::bigint, count(*) FROM sqlstreams.message_log_2 GROUP BY 1";
    let rows = scene.db.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Every second since the first one, each once, up to `upto`.
async fn assert_ticks(scene: &Scene, upto: i64) {
    until("what was missed is made up for", LIMIT, async || {
        ticks(scene).await.last_key_value().is_some_and(|(last, _)| *last >= upto)
    })
    .await;
    let ticks = ticks(scene).await;
    assert!(ticks.values().all(|times| *times == 1), "{ticks:?}");
    let (first, last) = (*ticks.first_key_value().unwrap().0, *ticks.last_key_value().unwrap().0);
    assert_eq!(ticks.len() as i64, last - first + 1, "some are missing: {ticks:?}");
    let runs = "SELECT count(*) - count(DISTINCT fire_time) FROM sqlstreams.schedule_run";
    assert_eq!(count(&scene.db, runs).await, 0);
    let rows = "SELECT count(*) FROM sqlstreams.maintenance";
    assert_eq!(count(&scene.db, rows).await, 1);
    let client = Client::connect(&scene.place.url).await.unwrap();
    assert_eq!(client.maintenance().status().await.unwrap().failures, []);
}

async fn now(scene: &Scene) -> i64 {
    count(&scene.db, "SELECT extract(epoch FROM clock_timestamp())::bigint").await
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_takes_over_when_the_holder_is_killed() {
    let scene = scene().await;
    let mut first = scene.process(1, 1, Script::Work(0));
    let mut was = held_by(&scene, &first).await;
    for kill in 1..=2 {
        let second = scene.process(kill + 1, 1, Script::Work(0));
        // It has come up, and does not get the lease.
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(holder(&scene).await.unwrap().1, was);
        let at = i64::from(kill) * 20_000;
        grow(&scene, at).await;
        first.kill();
        let killed = Instant::now();
        let next = held_by(&scene, &second).await;
        println!("another took over {:?} after the kill", killed.elapsed());
        assert_ne!(next, was);
        until("the upkeep goes on", LIMIT, async || grown(&scene, at).await).await;
        (first, was) = (second, next);
    }
    let upto = now(&scene).await;
    assert_ticks(&scene, upto).await;
    assert_eq!(first.stop().await, 0);
    assert_eq!(holder(&scene).await, None, "it was given back");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_holder_that_goes_on_does_no_harm() {
    let scene = scene().await;
    let mut processes = vec![scene.process(1, 1, Script::Work(0))];
    let mut was = held_by(&scene, &processes[0]).await;
    processes.push(scene.process(2, 1, Script::Work(0)));
    for freeze in 0..2 {
        let (frozen, other) = (&processes[freeze % 2], &processes[(freeze + 1) % 2]);
        frozen.freeze();
        let next = held_by(&scene, other).await;
        assert_ne!(next, was);
        let since = "SELECT extract(epoch FROM since)::bigint FROM sqlstreams.maintenance ORDER BY generation DESC LIMIT 1";
        let taken = count(&scene.db, since).await;
        let at = (freeze as i64 + 1) * 20_000;
        grow(&scene, at).await;
        // It goes on where it was, with steps that it had found due.
        frozen.thaw();
        let thawed = Instant::now();
        while thawed.elapsed() < Duration::from_secs(12) {
            assert_eq!(holder(&scene).await.map(|h| h.1).as_ref(), Some(&next));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(count(&scene.db, since).await, taken, "the lease was never lost");
        until("the upkeep goes on", LIMIT, async || grown(&scene, at).await).await;
        was = next;
    }
    let upto = now(&scene).await;
    assert_ticks(&scene, upto).await;
    for process in processes {
        process.stop().await;
    }
}
