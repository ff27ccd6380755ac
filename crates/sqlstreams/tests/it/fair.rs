//! Fair groups: where very many messages of one tenant wait, those of the others do not wait behind them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlstreams::{CancellationToken, Client, Delivery, Mode, Outgoing, RetryPolicy, Start, Stream};

use crate::child::Process;
use crate::journal::{Script, What};
use crate::scene::Scene;
use crate::support::{client, client_at, count, database, eventually, until};

const BIG: &str = "big";

async fn send(stream: &Stream<u64>, keys: impl IntoIterator<Item = String>) {
    let payload = 0;
    let all: Vec<String> = keys.into_iter().collect();
    for batch in all.chunks(5_000) {
        let messages = batch.iter().map(|key| Outgoing::new(&payload).key(key.as_str()));
        stream.producer().send_all(messages).await.unwrap();
    }
}

async fn send_big(stream: &Stream<u64>, messages: usize) {
    send(stream, std::iter::repeat_n(BIG.to_owned(), messages)).await;
}

/// 300 tenants with 4 messages each.
fn small() -> impl Iterator<Item = String> {
    (0..1_200).map(|n| format!("t{}", n % 300))
}

/// Those of the tenants that share a lane with the big one.
async fn neighbours(db: &tokio_postgres::Client) -> BTreeSet<String> {
    let sql = "SELECT DISTINCT key FROM sqlstreams.message_log_1 WHERE sqlstreams.lane_of(key, id) = sqlstreams.lane_of('big', 0) AND key <> 'big'";
    db.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// Consumes until `enough` messages of others than the big tenant were handled, and returns, for each of them, how many of the
/// big one's were before it.
async fn handled_before(
    consumer: sqlstreams::ConsumerBuilder<u64>,
    work: Duration,
    enough: usize,
) -> Vec<(String, usize)> {
    let (big, others) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let stop = CancellationToken::new();
    let (counted, noted, stopping) = (big.clone(), others.clone(), stop.clone());
    consumer
        .stop_on(stop)
        .run(move |message: Delivery<u64>| {
            let key = message.key.clone().unwrap();
            match key == BIG {
                true => {
                    counted.fetch_add(1, Ordering::SeqCst);
                }
                false => {
                    let mut others = noted.lock().unwrap();
                    others.push((key, counted.load(Ordering::SeqCst)));
                    if others.len() >= enough {
                        stopping.cancel();
                    }
                }
            }
            async move {
                if !work.is_zero() {
                    tokio::time::sleep(work).await;
                }
            }
        })
        .await
        .unwrap();
    std::mem::take(&mut others.lock().unwrap())
}

/// The most messages of the big tenant that anybody waits for.
const BOUND: usize = 1_000;

#[tokio::test(flavor = "multi_thread")]
async fn tb_171_a_tenant_with_very_many_messages_delays_nobody() {
    let work = Duration::from_millis(1);
    for (backlog, mode) in [(20_000, Mode::Parallel), (20_000, Mode::Fair), (100_000, Mode::Fair)] {
        let (client, db) = client().await;
        let stream = client.stream::<u64>("s").create().await.unwrap();
        let group = stream.group("g").mode(mode).create().await.unwrap();
        send_big(&stream, backlog).await;
        send(&stream, ["single".to_owned()].into_iter().chain(small())).await;
        let neighbours = neighbours(&db).await;
        let all_but_neighbours = 1_201 - 4 * neighbours.len();
        let work = if mode == Mode::Fair { work } else { Duration::ZERO };
        let consumer = group.consumer().concurrency(4);
        let before = handled_before(consumer, work, all_but_neighbours).await;
        let of_others = before.iter().filter(|(key, _)| !neighbours.contains(key));
        let most = of_others.map(|(_, before)| *before).max().unwrap();
        let single = before.iter().find(|(key, _)| key == "single").unwrap().1;
        println!(
            "{mode}, {backlog}: {single} before the single message, at most {most}; {} share the lane",
            neighbours.len()
        );
        match mode {
            Mode::Fair => assert!(most < BOUND, "{most} of {backlog}"),
            _ => assert!(single > backlog - 100, "{single} of {backlog}: this shows nothing"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_comes_later_is_handled_at_once() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").fair().create().await.unwrap();
    send_big(&stream, 30_000).await;
    // A neighbour of the big tenant's would wait with it.
    let keys = "SELECT 't' || n FROM generate_series(1, 100) AS n WHERE sqlstreams.lane_of('t' || n, 0) <> sqlstreams.lane_of('big', 0) LIMIT 20";
    let keys = db.query(keys, &[]).await.unwrap();
    let big = Arc::new(AtomicUsize::new(0));
    // How many of the big tenant were handled before each of the others was sent.
    let sent = Arc::new(Mutex::new(HashMap::new()));
    let sending = {
        let (stream, big, sent) = (stream.clone(), big.clone(), sent.clone());
        tokio::spawn(async move {
            for row in keys {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let key: String = row.get(0);
                sent.lock().unwrap().insert(key.clone(), big.load(Ordering::SeqCst));
                send(&stream, [key]).await;
            }
        })
    };
    // Two at a time: what a consumer holds of the big tenant is next to nothing.
    let late = Arc::new(Mutex::new(Vec::new()));
    let (noted, stop) = (late.clone(), CancellationToken::new());
    let (counted, stopping) = (big.clone(), stop.clone());
    let consumer = group.consumer().concurrency(2).stop_on(stop);
    let consumed = consumer.run(move |message: Delivery<u64>| {
        match message.key.as_deref() {
            Some(BIG) => {
                counted.fetch_add(1, Ordering::SeqCst);
            }
            key => {
                let before = sent.lock().unwrap()[key.unwrap()];
                let mut noted = noted.lock().unwrap();
                noted.push(counted.load(Ordering::SeqCst) - before);
                if noted.len() == 20 {
                    stopping.cancel();
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(2))
    });
    consumed.await.unwrap();
    sending.await.unwrap();
    let mut late = std::mem::take(&mut *late.lock().unwrap());
    late.sort_unstable();
    let big = big.load(Ordering::SeqCst);
    println!(
        "behind {} of the big tenant in the median, {} at most; {big} in all",
        late[10], late[19]
    );
    // The big tenant has work for much longer, and goes on in between.
    assert!(late[10] < BOUND, "{late:?}");
    assert!(big > 200 && big < 25_000, "{big}");
}

/// Skewed keys, flaky handlers, consumers of all sizes: each message ends well once.
#[tokio::test(flavor = "multi_thread")]
async fn without_crashes_every_message_is_handled_once() {
    for transactional in [false, true] {
        let url = database().await;
        let (client, db) = client_at(&url).await;
        let stream = client.stream::<u64>("s").create().await.unwrap();
        let retry = RetryPolicy::attempts(10).backoff(Duration::ZERO, 1.0, Duration::ZERO);
        stream.group("g").fair().retry(retry).create().await.unwrap();
        db.batch_execute("CREATE TABLE effect (id bigint)").await.unwrap();
        let messages: u64 = if transactional { 1_500 } else { 6_000 };
        let key = |n: u64| match n {
            _ if n % 3_000 < 1_500 && !n.is_multiple_of(20) => BIG.to_owned(),
            _ if n.is_multiple_of(3) => "other".to_owned(),
            _ => format!("k{}", n % 97),
        };
        let producing = {
            let stream = stream.clone();
            tokio::spawn(async move {
                for first in (0..messages).step_by(100) {
                    let numbers: Vec<u64> = (first..first + 100).collect();
                    let batch = numbers.iter().map(|n| match n % 50 {
                        7 => Outgoing::new(n),
                        _ => Outgoing::new(n).key(key(*n)),
                    });
                    stream.producer().send_all(batch).await.unwrap();
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..20))).await;
                }
            })
        };
        let handled = Arc::new(Mutex::new(HashMap::<u64, usize>::new()));
        let stop = CancellationToken::new();
        let mut consumers = Vec::new();
        for (number, concurrency) in [1, 3, 8, 16].into_iter().enumerate() {
            let client = Client::connect(&url).await.unwrap();
            let group = client.stream::<u64>("s").open().await.unwrap().group("g");
            let consumer = group.consumer().concurrency(concurrency).stop_on(stop.clone());
            let handled = handled.clone();
            consumers.push(tokio::spawn(async move {
                if transactional && number > 0 {
                    return consumer
                        .run_transactional(move |message: Delivery<u64>, tx| {
                            let handled = handled.clone();
                            async move {
                                let id = message.id;
                                tx.execute("INSERT INTO effect VALUES ($1)", &[&id]).await?;
                                if fastrand::u8(0..20) == 0 {
                                    tx.execute("SELECT 1 / 0", &[]).await?;
                                }
                                *handled.lock().unwrap().entry(message.payload).or_default() += 1;
                                Ok::<_, tokio_postgres::Error>(())
                            }
                        })
                        .await;
                }
                consumer
                    .run(move |message: Delivery<u64>| {
                        let handled = handled.clone();
                        async move {
                            tokio::time::sleep(Duration::from_micros(fastrand::u64(0..3_000)))
                                .await;
                            if fastrand::u8(0..20) == 0 {
                                return Err("by chance");
                            }
                            *handled.lock().unwrap().entry(message.payload).or_default() += 1;
                            Ok(())
                        }
                    })
                    .await
            }));
        }
        producing.await.unwrap();
        let resolved =
            "SELECT sqlstreams.is_resolved(1, 1, sqlstreams.stream_head(1))::int::bigint";
        until("all are resolved", Duration::from_secs(90), async || {
            count(&db, resolved).await == 1
        })
        .await;
        stop.cancel();
        for consumer in consumers {
            consumer.await.unwrap().unwrap();
        }
        let handled = std::mem::take(&mut *handled.lock().unwrap());
        let repeated: Vec<_> = handled.iter().filter(|(_, times)| **times > 1).collect();
        assert_eq!(
            (handled.len() as u64, repeated),
            (messages, vec![]),
            "transactional: {transactional}"
        );
        let sql = "SELECT count(*) - count(DISTINCT id) FROM effect";
        assert_eq!(count(&db, sql).await, 0);
        for table in ["consumer_lease_1", "exception_queue_1", "consumer_done_1"] {
            assert_eq!(
                count(&db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await,
                0,
                "{table}"
            );
        }
    }
}

/// How long there is trouble, in seconds.
fn trouble() -> Duration {
    let seconds = std::env::var("SQLSTREAMS_FAIR_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(8))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_lost_whatever_is_killed_or_frozen() {
    let scene = Scene::new("s", 0, Duration::from_secs(1)).await;
    scene.group.set_mode(Mode::Fair).await.unwrap();
    let begun = Instant::now();
    let producing = {
        let stream = scene.stream.clone();
        tokio::spawn(async move {
            let mut next = 0;
            while begun.elapsed() < trouble() {
                let numbers: Vec<u64> = (next..next + 60).collect();
                let burst = fastrand::bool();
                let batch = numbers.iter().map(|n| {
                    Outgoing::new(n).key(if burst {
                        BIG.to_owned()
                    } else {
                        format!("k{}", n % 80)
                    })
                });
                stream.producer().send_all(batch).await.unwrap();
                next += 60;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            next
        })
    };
    let (mut number, mut killed, mut frozen) = (0, 0, 0);
    let mut start = || {
        number += 1;
        scene.process(number, 6, Script::Flaky(3_000))
    };
    let mut processes: Vec<Process> = (0..4).map(|_| start()).collect();
    while begun.elapsed() < trouble() {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(100..400))).await;
        let at = fastrand::usize(0..processes.len());
        if fastrand::bool() {
            std::mem::replace(&mut processes[at], start()).kill();
            killed += 1;
        } else {
            processes[at].freeze();
            tokio::time::sleep(Duration::from_millis(fastrand::u64(200..1_800))).await;
            processes[at].thaw();
            frozen += 1;
        }
    }
    let messages = producing.await.unwrap();
    scene.until_resolved(90).await;
    for process in processes {
        process.stop().await;
    }
    let sql = "SELECT m.payload::text::bigint FROM sqlstreams.exception_queue_1 AS e JOIN sqlstreams.message_log_1 AS m ON m.id = e.message_id WHERE state = 'dead'";
    let rows = scene.db.query(sql, &[]).await.unwrap();
    let dead: BTreeSet<u64> = rows.iter().map(|row| row.get::<_, i64>(0) as u64).collect();
    let done = scene.journal.times(What::Done);
    let lost = (0..messages).filter(|n| !done.contains_key(n) && !dead.contains(n)).count();
    let repeated = done.values().filter(|times| **times > 1).count();
    println!(
        "{messages} messages, {killed} killed, {frozen} frozen, {} dead, {repeated} repeated",
        dead.len()
    );
    assert_eq!(lost, 0);
    for table in ["consumer_lease_1", "consumer_done_1"] {
        assert_eq!(
            count(&scene.db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await,
            0,
            "{table}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_lets_tenants_take_turns() {
    let (client, _) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").fair().max_in_flight(2).create().await.unwrap();
    send_big(&stream, 5_000).await;
    send(&stream, ["single".to_owned()]).await;
    let before = handled_before(group.consumer().concurrency(4), Duration::ZERO, 1).await;
    println!("{before:?}");
    assert!(before[0].1 < 200, "{before:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bindings_and_pauses_hold_in_fair_groups() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").fair().bind("a.#").create().await.unwrap();
    let numbers: Vec<u64> = (0..8_000).collect();
    let batch = numbers.iter().map(|n| {
        let key = if n % 100 < 95 { BIG.to_owned() } else { format!("k{n}") };
        Outgoing::new(n).key(key).routing_key(if n.is_multiple_of(4) { "a.x" } else { "b" })
    });
    stream.producer().send_all(batch).await.unwrap();
    let handled = Arc::new(Mutex::new(BTreeMap::<u64, usize>::new()));
    let (noted, stop) = (handled.clone(), CancellationToken::new());
    let consumer = group.consumer().concurrency(4).stop_on(stop.clone());
    let consuming = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
        *noted.lock().unwrap().entry(message.payload).or_default() += 1;
        tokio::time::sleep(Duration::from_millis(1))
    }));
    eventually(async || handled.lock().unwrap().len() > 100).await;
    group.pause().await.unwrap();
    eventually(async || {
        count(&db, "SELECT count(*) FROM sqlstreams.consumer_group_cursor WHERE paused").await == 1
    })
    .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let at = handled.lock().unwrap().len();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(handled.lock().unwrap().len() <= at + 4);
    group.resume().await.unwrap();
    let resolved = "SELECT sqlstreams.is_resolved(1, 1, sqlstreams.stream_head(1))::int::bigint";
    eventually(async || count(&db, resolved).await == 1).await;
    stop.cancel();
    consuming.await.unwrap().unwrap();
    let handled = std::mem::take(&mut *handled.lock().unwrap());
    assert!(handled.iter().all(|(n, times)| n.is_multiple_of(4) && *times == 1));
    assert_eq!(handled.len(), 2_000);
    let status = group.status().await.unwrap();
    assert_eq!((status.mode, status.claimed, status.resolved), (Mode::Fair, 8_000, 8_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_of_one_tenant_do_not_delay_the_retries_of_others() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let retry = RetryPolicy::attempts(20).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    let group = stream.group("g").fair().retry(retry).create().await.unwrap();
    group.pause().await.unwrap();
    send_big(&stream, 20_000).await;
    // All of them have failed, and are due; another tenant's message has just failed once.
    db.batch_execute(
        "INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, attempts, due_at, key, lane)
             SELECT 1, id, 'ready', 1, clock_timestamp() - interval '1 minute', key, sqlstreams.lane_of(key, id) FROM sqlstreams.message_log_1;
         UPDATE sqlstreams.consumer_group_cursor_1 SET claimed = 20000, cohorts = ARRAY[(-1, 20000)::sqlstreams.lane_cohort]",
    )
    .await
    .unwrap();
    send(&stream, ["single".to_owned()]).await;
    db.batch_execute(
        "INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, attempts, due_at, key, lane)
             SELECT 1, id, 'ready', 1, clock_timestamp(), key, sqlstreams.lane_of(key, id) FROM sqlstreams.message_log_1 WHERE id = 20001;
         UPDATE sqlstreams.consumer_group_cursor_1 SET claimed = 20001, cohorts = ARRAY[(-1, 20001)::sqlstreams.lane_cohort]",
    )
    .await
    .unwrap();
    send(&stream, ["fresh".to_owned()]).await;
    group.resume().await.unwrap();
    let consumer = group.consumer().concurrency(4);
    let before = handled_before(consumer, Duration::from_millis(1), 2).await;
    println!("{before:?}");
    assert!(before.iter().all(|(_, before)| *before < 2_000), "{before:?}");
}

/// Consumers run on while the group goes through all modes, and each message is handled once.
#[tokio::test(flavor = "multi_thread")]
async fn the_mode_changes_under_running_consumers() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").start(Start::Beginning).create().await.unwrap();
    let handled = Arc::new(Mutex::new(BTreeMap::<u64, usize>::new()));
    let stop = CancellationToken::new();
    let mut consumers = Vec::new();
    for _ in 0..3 {
        let client = Client::connect(&url).await.unwrap();
        let noted = handled.clone();
        let consumer = client.stream::<u64>("s").open().await.unwrap().group("g").consumer();
        let consumer = consumer.concurrency(3).stop_on(stop.clone());
        consumers.push(tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            *noted.lock().unwrap().entry(message.payload).or_default() += 1;
            tokio::time::sleep(Duration::from_micros(fastrand::u64(0..2_000)))
        })));
    }
    let mut next = 0;
    let modes = [
        Mode::Fair,
        Mode::Ordered,
        Mode::Fair,
        Mode::Parallel,
        Mode::Ordered,
        Mode::Parallel,
        Mode::Fair,
    ];
    for mode in modes {
        let numbers: Vec<u64> = (next..next + 600).collect();
        let batch = numbers.iter().map(|n| {
            Outgoing::new(n).key(if n % 10 < 7 { BIG.to_owned() } else { format!("k{n}") })
        });
        stream.producer().send_all(batch).await.unwrap();
        next += 600;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..300))).await;
        // Refused while something is handed out.
        until("the mode is changed", Duration::from_secs(60), async || {
            group.set_mode(mode).await.is_ok()
        })
        .await;
        assert_eq!(group.mode().await.unwrap(), mode);
    }
    let resolved = "SELECT sqlstreams.is_resolved(1, 1, sqlstreams.stream_head(1))::int::bigint";
    until("all are resolved", Duration::from_secs(60), async || count(&db, resolved).await == 1)
        .await;
    stop.cancel();
    for consumer in consumers {
        consumer.await.unwrap().unwrap();
    }
    let handled = std::mem::take(&mut *handled.lock().unwrap());
    let repeated: Vec<_> = handled.iter().filter(|(_, times)| **times > 1).collect();
    assert_eq!((handled.len() as u64, repeated), (next, vec![]));
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.consumer_lease_1").await, 0);
}

/// Bindings that judge what a lane has not read yet are kept, also when the leases of the others are beyond.
#[tokio::test(flavor = "multi_thread")]
async fn lanes_that_are_behind_are_judged_by_the_bindings_of_then() {
    let (client, db) = client().await;
    client.stream::<u64>("s").create().await.unwrap();
    let produce = async |messages: i32| {
        let sql = format!(
            "INSERT INTO sqlstreams.message_log_1 (key, routing_key, payload) SELECT 'big', 'a', '1' FROM generate_series(1, {messages})"
        );
        db.batch_execute(&sql).await.unwrap();
    };
    // All lanes but that of the messages.
    let lanes = "~(1::bigint << sqlstreams.lane_of('big', 0))";
    let advance = async |done: &str, lanes: &str, limit: i32| {
        let sql = format!(
            "SELECT token FROM sqlstreams.advance(1, 1, {done}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', {limit}, gen_random_uuid(), NULL, 20, {lanes})"
        );
        db.query_one(&sql, &[]).await.unwrap().get::<_, Option<uuid::Uuid>>(0)
    };
    let sql = "SELECT sqlstreams.create_group(1, 'g', p_mode => 'fair', p_bindings => '[\"a\"]')";
    db.execute(sql, &[]).await.unwrap();
    let nothing = "'{}', '{}', '{}'";
    produce(5).await;
    advance(nothing, lanes, 5).await.unwrap();
    db.execute("SELECT sqlstreams.set_bindings(1, 1, '[\"b\"]')", &[]).await.unwrap();
    produce(15).await;
    let ahead = advance(nothing, lanes, 15).await.unwrap();
    let of_all = "(SELECT array_agg(seq) FROM sqlstreams.consumer_lease_1), (SELECT array_agg(token ORDER BY seq) FROM sqlstreams.consumer_lease_1), ARRAY['{[1,11)}', '{[1,11)}']::int8multirange[]";
    advance(of_all, lanes, 0).await;
    let sql = "SELECT lower(pending) FROM sqlstreams.consumer_lease_1 WHERE token = $1";
    assert_eq!(db.query_one(sql, &[&ahead]).await.unwrap().get::<_, i64>(0), 11);
    for n in 0..110 {
        let sql = format!("SELECT sqlstreams.set_bindings(1, 1, '[\"c{n}\"]')");
        db.execute(&sql, &[]).await.unwrap();
    }
    assert!(count(&db, "SELECT count(*) FROM sqlstreams.binding_set").await > 110);
    let mut found = Vec::new();
    for _ in 0..4 {
        let Some(token) = advance(nothing, "-1", 20).await else { continue };
        let sql = "SELECT id FROM sqlstreams.fetch(1, 1, $1, 0, 100, 100000, NULL::json)";
        let rows = db.query(sql, &[&token]).await.unwrap();
        found.extend(rows.iter().map(|row| row.get::<_, i64>(0)));
    }
    assert_eq!(found, [1, 2, 3, 4, 5]);
}

/// The database comes back on a server that hashes keys differently: messages may be repeated, none is lost.
#[tokio::test(flavor = "multi_thread")]
async fn lanes_that_have_changed_lose_nothing() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let group = stream.group("g").fair().create().await.unwrap();
    send(&stream, (0..1_200).map(|n| format!("k{}", n % 50))).await;
    // Half of the lanes were read to the end, the others to 900; a row and a lease are in lanes where they do not belong.
    db.batch_execute(
        "SET search_path = sqlstreams;
         UPDATE consumer_group SET lane_probe = 1;
         INSERT INTO consumer_lease_1 (group_id, seq, token, lanes, pending, expires_at)
            SELECT 1, next_seq, gen_random_uuid(), 7, '{[700,800)}', now() + interval '1 hour' FROM consumer_group_cursor_1;
         INSERT INTO exception_queue_1 (group_id, message_id, state, due_at, key, lane, lease_id, lease_expires_at)
            SELECT 1, id, 'inflight', now(), key, 63 - lane_of(key, id), gen_random_uuid(), now() + interval '1 hour' FROM message_log_1 WHERE id IN (750, 1100);
         UPDATE consumer_group_cursor_1 SET claimed = 900, next_seq = next_seq + 1,
            cohorts = ARRAY[(x'00000000ffffffff'::bigint, 900)::lane_cohort, ((~x'00000000ffffffff'::bigint), 1200)::lane_cohort]",
    )
    .await
    .unwrap();
    let handled = Arc::new(Mutex::new(Vec::new()));
    let all = handled.clone();
    let consumer = group.consumer().concurrency(4).until_caught_up();
    let consumed = consumer
        .run(move |message: Delivery<u64>| {
            all.lock().unwrap().push(message.id);
            std::future::ready(())
        })
        .await
        .unwrap();
    let mut handled = handled.lock().unwrap().clone();
    handled.sort_unstable();
    assert_eq!(handled, (700..=1_200).collect::<Vec<i64>>());
    assert_eq!(consumed.handled, 501);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
    let told = "SELECT count(*) FROM sqlstreams.audit WHERE action = 'realign'";
    assert_eq!(count(&db, told).await, 1);
}

/// What the lanes that were ahead have done is not done again, and what the one behind has not is done, whatever the mode is then.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_mode_keeps_each_lane_where_it_is() {
    for modes in
        [vec!["ordered"], vec!["parallel"], vec!["ordered", "fair"], vec!["ordered", "parallel"]]
    {
        let (client, db) = client().await;
        let stream = client.stream::<u64>("s").create().await.unwrap();
        let group = stream.group("g").fair().create().await.unwrap();
        send(&stream, (0..40).map(|n| if n % 2 == 1 { BIG.to_owned() } else { format!("k{n}") }))
            .await;
        let lanes = "~(1::bigint << sqlstreams.lane_of('big', 0))";
        let sql = format!(
            "SELECT sqlstreams.settle(1, 1, seq, token, pending) FROM sqlstreams.advance(1, 1, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 40, gen_random_uuid(), NULL, 40, {lanes})"
        );
        assert!(db.query_one(&sql, &[]).await.unwrap().get::<_, bool>(0));
        let of_lane = format!(
            "SELECT count(*) FROM sqlstreams.message_log_1 WHERE ({lanes} >> sqlstreams.lane_of(key, id)) & 1 = 0"
        );
        let behind = count(&db, &of_lane).await as u64;
        for mode in &modes {
            group.set_mode(mode.parse().unwrap()).await.unwrap();
        }
        let consumed = group.consumer().until_caught_up().run(async |_: Delivery<u64>| {}).await;
        assert_eq!(consumed.unwrap().handled, behind, "{modes:?}");
    }
}

/// However the last claims fall, a consumer that has everything ends. Most messages are one key's, so that claims are for the other
/// lanes only, up to the last.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn consumers_of_a_fair_group_end_when_they_have_caught_up() {
    let (client, _) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    send_big(&stream, 2_000).await;
    send(&stream, (0..40).map(|n| format!("t{n}"))).await;
    for round in 0..12 {
        let group = stream.group(format!("g{round}")).fair();
        let consumer = group.consumer().concurrency(1 + round % 4).until_caught_up();
        let consumed = consumer.run(async |_: Delivery<u64>| {
            tokio::time::sleep(Duration::from_micros(200)).await;
        });
        let consumed = tokio::time::timeout(Duration::from_secs(60), consumed).await;
        assert_eq!(consumed.expect("it ends").unwrap().handled, 2_040);
    }
}
