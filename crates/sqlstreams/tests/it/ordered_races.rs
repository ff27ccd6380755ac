//! What operators do to messages of an ordered group while others of their keys run; and a server that puts keys into other lanes.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlstreams::{CancellationToken, Client, Delivery, Outgoing, RetryPolicy, Stream};

use crate::support::{client, client_at, connect, count, database, until};

const KEYS: u64 = 6;

async fn send(stream: &Stream<u64>, numbers: std::ops::Range<u64>) {
    let numbers: Vec<u64> = numbers.collect();
    let all = numbers.iter().map(|n| Outgoing::new(n).key(format!("k{}", n % KEYS)));
    stream.producer().send_all(all).await.unwrap();
}

#[derive(Debug, Default)]
struct Seen {
    running: HashMap<String, i64>,
    /// Those that ended well, in order.
    done: Vec<(String, i64)>,
    wrong: Vec<String>,
    attempts: HashMap<i64, u32>,
}

/// Rows that can run although an earlier one of their key waits, too: rule 4.
const JUMPS: &str = "SELECT count(*) FROM sqlstreams.exception_queue_1 AS e WHERE state = 'ready'
    AND EXISTS (SELECT FROM sqlstreams.exception_queue_1 AS b WHERE b.key = e.key AND b.state <> 'dead' AND b.message_id < e.message_id)";

/// Dead messages of few keys are redriven and discarded all the time, while others of these keys run, fail and wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn redriven_and_discarded_messages_never_run_beside_others_of_their_key() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let pause = Duration::from_millis(5);
    let retry = RetryPolicy::attempts(2).backoff(pause, 1.0, pause);
    let group = stream.group("g").ordered().retry(retry).create().await.unwrap();
    let (seen, stop) = (Arc::new(Mutex::new(Seen::default())), CancellationToken::new());
    let mut running = Vec::new();
    for _ in 0..2 {
        let client = Client::connect(&url).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let consumer = stream.group("g").consumer().concurrency(4).stop_on(stop.clone());
        let noted = seen.clone();
        running.push(tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            let noted = noted.clone();
            async move {
                let (key, id) = (message.key.clone().unwrap(), message.id);
                let attempts = {
                    let mut seen = noted.lock().unwrap();
                    if let Some(other) = seen.running.insert(key.clone(), id) {
                        seen.wrong.push(format!("{key}: {id} began while {other} ran"));
                    }
                    if seen.done.contains(&(key.clone(), id)) {
                        seen.wrong.push(format!("{key}: {id} began though it was done"));
                    }
                    let attempts = seen.attempts.entry(id).or_default();
                    *attempts += 1;
                    *attempts
                };
                tokio::time::sleep(Duration::from_micros(fastrand::u64(0..1_500))).await;
                let fails = match message.payload % 5 {
                    0 => attempts < 5,
                    1 => attempts < 2,
                    _ => false,
                };
                let mut seen = noted.lock().unwrap();
                seen.running.remove(&key);
                if fails {
                    return Err("not yet");
                }
                seen.done.push((key, id));
                Ok(())
            }
        })));
    }
    let jumps = {
        let db = connect(&url).await;
        tokio::spawn(async move {
            let mut jumps = 0;
            loop {
                jumps += count(&db, JUMPS).await;
                assert_eq!(jumps, 0, "rows that can run before earlier ones of their key");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    };
    let begun = Instant::now();
    let mut discarded = HashSet::new();
    let (mut next, mut redriven) = (0, 0_usize);
    let enough = |redriven, discarded| redriven > 40 && discarded > 3;
    while begun.elapsed() < Duration::from_secs(8) || !enough(redriven, discarded.len()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing dies");
        match fastrand::u8(0..8) {
            0 | 1 => {
                let dead = "SELECT message_id FROM sqlstreams.exception_queue_1 WHERE state = 'dead' ORDER BY random() LIMIT 1";
                if let Some(row) = db.query_opt(dead, &[]).await.unwrap() {
                    discarded.extend(group.discard(Some(&[row.get(0)]), 1).await.unwrap());
                }
            }
            2..5 if next < 900 => {
                send(&stream, next..next + 30).await;
                next += 30;
            }
            _ => redriven += group.redrive(None, fastrand::i64(1..5)).await.unwrap().len(),
        }
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..4_000))).await;
    }
    let open = "SELECT count(*) FROM sqlstreams.exception_queue_1";
    until("all are done", Duration::from_secs(90), async || {
        group.redrive(None, 1_000).await.unwrap();
        let resolved = format!("SELECT sqlstreams.is_resolved(1, 1, {next})::int::bigint");
        count(&db, open).await == 0 && count(&db, &resolved).await == 1
    })
    .await;
    assert!(!jumps.is_finished(), "{:?}", jumps.await);
    jumps.abort();
    stop.cancel();
    for consumer in running {
        consumer.await.unwrap().unwrap();
    }
    let seen = seen.lock().unwrap();
    println!("{next} messages, {redriven} redriven, {} discarded", discarded.len());
    assert!(seen.wrong.is_empty(), "{:#?}", seen.wrong);
    let done: HashSet<i64> = seen.done.iter().map(|(_, id)| *id).collect();
    assert!(done.is_disjoint(&discarded));
    assert_eq!(done.len() + discarded.len(), next as usize);
    // Those that never died were done in their order.
    let mut latest: HashMap<&str, i64> = HashMap::new();
    for (key, id) in seen.done.iter().filter(|(_, id)| seen.attempts[id] < 3) {
        let before = latest.insert(key, *id).unwrap_or(0);
        assert!(before < *id, "{key}: {id} was done after {before}");
    }
}

/// A group that comes to a server which puts its keys into other lanes, with everything in hand that there can be.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hashes_differently_is_noticed() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let hour = Duration::from_secs(3600);
    let retry = RetryPolicy::attempts(5).backoff(hour, 1.0, hour);
    let group = stream.group("g").ordered().retry(retry).create().await.unwrap();
    send(&stream, 0..1_200).await;
    let handled: Arc<Mutex<Vec<u64>>> = Arc::default();
    let run = |fails: &'static [u64], stop: CancellationToken| {
        let handled = handled.clone();
        let consumer = group.consumer().concurrency(8).stop_on(stop);
        tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            let fails = fails.contains(&message.payload);
            if !fails {
                handled.lock().unwrap().push(message.payload);
            }
            std::future::ready(if fails { Err("no") } else { Ok(()) })
        }))
    };
    let stop = CancellationToken::new();
    let running = run(&[601, 602], stop.clone());
    // Two keys wait for an hour: one from 601, one from 602 on.
    until("what can be handled is", Duration::from_secs(30), async || {
        handled.lock().unwrap().len() == 1_000
    })
    .await;
    let rows = "SELECT count(*) FROM sqlstreams.exception_queue_1";
    until("the others have rows", Duration::from_secs(30), async || count(&db, rows).await == 200)
        .await;
    stop.cancel();
    running.await.unwrap().unwrap();

    // As if the server were another: rows are in lanes where they do not belong, some lanes were read to 900 only, somebody holds a lease.
    db.batch_execute(
        "SET search_path = sqlstreams;
         UPDATE consumer_group SET lane_probe = 1;
         UPDATE exception_queue_1 SET lane = (lane + 7) % 64;
         UPDATE consumer_group_cursor_1 SET cohorts = ARRAY[(x'00000000ffffffff'::bigint, 900)::lane_cohort, ((~x'00000000ffffffff'::bigint), 1200)::lane_cohort];
         INSERT INTO consumer_lease_1 (group_id, seq, token, holder, lanes, pending, expires_at)
            SELECT 1, next_seq, gen_random_uuid(), gen_random_uuid(), -1, '{[700,800)}', now() + interval '1 hour' FROM consumer_group_cursor_1;
         UPDATE consumer_group_cursor_1 SET next_seq = next_seq + 1;
         UPDATE exception_queue_1 SET due_at = clock_timestamp() WHERE state = 'ready'",
    )
    .await
    .unwrap();
    handled.lock().unwrap().clear();
    let stop = CancellationToken::new();
    let running = run(&[], stop.clone());
    until("all are handled", Duration::from_secs(30), async || {
        count(&db, "SELECT sqlstreams.is_resolved(1, 1, 1200)::int::bigint").await == 1
            && count(&db, rows).await == 0
    })
    .await;
    stop.cancel();
    running.await.unwrap().unwrap();
    let again = handled.lock().unwrap().clone();
    // The two keys, and once more everything from 700 on.
    let expected: HashSet<u64> =
        (0..1_200).filter(|n| *n >= 699 || *n >= 601 && matches!(n % KEYS, 1 | 2)).collect();
    assert_eq!(again.iter().copied().collect::<HashSet<_>>(), expected);
    assert_eq!(again.len(), expected.len());
    for key in 0..KEYS {
        let of_key: Vec<u64> = again.iter().copied().filter(|n| n % KEYS == key).collect();
        assert!(of_key.is_sorted(), "{key}: {of_key:?}");
    }
    let told = "SELECT count(*) FROM sqlstreams.audit WHERE action = 'realign'";
    assert_eq!(count(&db, told).await, 1);
    let probe =
        "SELECT count(*) FROM sqlstreams.consumer_group WHERE lane_probe = sqlstreams.lane_probe()";
    assert_eq!(count(&db, probe).await, 1);
}

/// A lease that its holder has left is passed by, as all its lanes are somebody else's: what was settled in it stays settled.
#[tokio::test]
async fn what_was_settled_in_a_lease_that_is_passed_by_is_not_run_again() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.group("g").ordered().create().await.unwrap();
    send(&stream, 0..10).await;
    // Claims for one who wants messages of these lanes: the ids that are pending in what was claimed.
    let claim = async |lanes: i64| -> String {
        let sql = format!(
            "SELECT coalesce(pending::text, 'nothing') FROM sqlstreams.advance_lanes(1, 1, gen_random_uuid(), NULL, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}',
                '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 100, false, gen_random_uuid(), {lanes})"
        );
        db.query_one(&sql, &[]).await.unwrap().get(0)
    };
    db.batch_execute("SELECT sqlstreams.alter_group(1, 1, p_transactional => true)").await.unwrap();
    assert_eq!(claim(-1).await, "{[1,11)}");
    // A handler's transaction commits, and nobody hears of it.
    db.batch_execute(
        "SELECT sqlstreams.settle_in_transaction(1, 1, (SELECT token FROM sqlstreams.consumer_lease_1), '{5}');
         UPDATE sqlstreams.consumer_lease_1 SET expires_at = clock_timestamp()",
    )
    .await
    .unwrap();
    assert_eq!(claim(0).await, "nothing");
    assert_eq!(claim(-1).await, "{[1,5),[6,11)}");
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.consumer_done_1").await, 0);
}

/// A message is redriven while a later one of its key is in hand: those that follow the later one wait for that, too.
#[tokio::test]
async fn a_redriven_message_takes_along_only_what_is_before_those_in_hand() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.group("g").ordered().create().await.unwrap();
    let numbers: Vec<u64> = (0..6).collect();
    stream.producer().send_all(numbers.iter().map(|n| Outgoing::new(n).key("k"))).await.unwrap();
    db.batch_execute(
        "SELECT sqlstreams.advance_lanes(1, 1, gen_random_uuid(), NULL, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 100, false, gen_random_uuid());
         DELETE FROM sqlstreams.consumer_lease_1;
         INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, key, lane, attempts, due_at, dead_at)
             SELECT 1, id, CASE id WHEN 1 THEN 'dead' WHEN 3 THEN 'ready' ELSE 'deferred' END, 'k', sqlstreams.lane_of('k', id), (id IN (1, 3))::int, now(), CASE id WHEN 1 THEN now() END
             FROM sqlstreams.message_log_1 WHERE id <> 2",
    )
    .await
    .unwrap();
    let holder = uuid::Uuid::new_v4();
    let (first, second) = (uuid::Uuid::new_v4(), uuid::Uuid::new_v4());
    let claim = async |held: &str, done: &str, token: uuid::Uuid| -> Option<Vec<i64>> {
        let sql = format!(
            "SELECT ids FROM sqlstreams.advance_lanes(1, 1, '{holder}', NULL, '{{{held}}}', '{{{done}}}', '{{{}}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 100, false, '{token}')",
            if held.is_empty() { "" } else { "false" }
        );
        db.query_one(&sql, &[]).await.unwrap().get(0)
    };
    // One that has failed runs alone.
    assert_eq!(claim("", "", first).await, Some(vec![3]));
    assert_eq!(stream.group("g").open().await.unwrap().redrive(None, 10).await.unwrap(), [1]);
    assert_eq!(claim(&first.to_string(), "\"{}\"", second).await, Some(vec![1]));
}
