//! Ordered groups: messages of one key one at a time, in id order, whatever fails or dies.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlstreams::{CancellationToken, Client, Delivery, Mode, Outgoing, RetryPolicy, Stream};

use crate::buffers::{buffers, middle};
use crate::child::{Place, Process};
use crate::journal::{self, Script, What};
use crate::support::{client, client_at, count, database, eventually};

/// What handlers did, in the order in which they did it.
#[derive(Debug, Default)]
struct Journal(Mutex<Vec<(Instant, Event)>>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Event {
    Began { run: u64, id: i64, key: String },
    Ended { run: u64, id: i64, ok: bool },
}

impl Journal {
    fn note(&self, event: Event) {
        self.0.lock().unwrap().push((Instant::now(), event));
    }

    fn events(&self) -> Vec<(Instant, Event)> {
        self.0.lock().unwrap().clone()
    }
}

/// A stream with messages of so many keys in turn.
async fn keyed(client: &Client, name: &str, messages: u64, keys: u64) -> Stream<u64> {
    let stream = client.stream::<u64>(name).create().await.unwrap();
    send(&stream, messages, keys).await;
    stream
}

async fn send(stream: &Stream<u64>, messages: u64, keys: u64) {
    let payloads: Vec<u64> = (0..messages).collect();
    let batch = payloads.iter().map(|n| Outgoing::new(n).key(format!("k{}", n % keys)));
    stream.producer().send_all(batch).await.unwrap();
}

/// Fails where a message of a key began before all those of the key before it had ended well, or two ran at once.
fn check_order(events: &[(Instant, Event)], dead: &HashSet<i64>) {
    let mut of_key: HashMap<&str, BTreeMap<i64, bool>> = HashMap::new();
    for (_, event) in events {
        if let Event::Began { id, key, .. } = event {
            of_key.entry(key).or_default().entry(*id).or_insert(dead.contains(id));
        }
    }
    let mut running: HashMap<&str, i64> = HashMap::new();
    let mut key_of: HashMap<u64, &str> = HashMap::new();
    for (_, event) in events {
        match event {
            Event::Began { run, id, key } => {
                let before = of_key[key.as_str()].range(..id).find(|(_, done)| !**done);
                assert!(before.is_none(), "{key}: {id} began while {before:?} was not final");
                let other = running.insert(key, *id);
                assert!(other.is_none(), "{key}: {id} began while {other:?} ran");
                key_of.insert(*run, key);
            }
            Event::Ended { run, id, ok } => {
                let key = key_of[run];
                running.remove(key);
                if *ok {
                    of_key.get_mut(key).unwrap().insert(*id, true);
                }
            }
        }
    }
}

fn at_once(attempts: u32) -> RetryPolicy {
    RetryPolicy::attempts(attempts).backoff(Duration::ZERO, 1.0, Duration::ZERO)
}

async fn dead(db: &tokio_postgres::Client) -> HashSet<i64> {
    let sql = "SELECT message_id FROM sqlstreams.exception_queue_1 WHERE state = 'dead'";
    db.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_a_key_are_handled_in_order_across_failures() {
    let (client, db) = client().await;
    let stream = keyed(&client, "s", 5_000, 50).await;
    let journal = Arc::new(Journal::default());
    let noted = journal.clone();
    let consumer = stream.group("g").ordered().retry(at_once(3)).consumer();
    let consumed = consumer
        .concurrency(16)
        .until_caught_up()
        .run(move |message: Delivery<u64>| {
            let noted = noted.clone();
            async move {
                let (id, key) = (message.id, message.key.clone().unwrap());
                let run = fastrand::u64(..);
                noted.note(Event::Began { run, id, key });
                tokio::time::sleep(Duration::from_micros(fastrand::u64(0..200))).await;
                let ok = match message.payload % 97 {
                    1 => false,
                    2 => message.attempt() > 2,
                    _ => true,
                };
                noted.note(Event::Ended { run, id, ok });
                if ok { Ok(()) } else { Err("no") }
            }
        })
        .await
        .unwrap();
    let dead = dead(&db).await;
    assert_eq!(dead.len(), (0..5_000).filter(|n| n % 97 == 1).count());
    assert_eq!(consumed.handled as usize, 5_000 - dead.len());
    check_order(&journal.events(), &dead);
    // What had ended well was not run again, whatever came next of its key.
    let well =
        journal.events().iter().filter(|(_, e)| matches!(e, Event::Ended { ok: true, .. })).count();
    assert_eq!(well, 5_000 - dead.len());
    for sql in [
        "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state <> 'dead'",
        "SELECT count(*) FROM sqlstreams.consumer_lease_1",
    ] {
        assert_eq!(count(&db, sql).await, 0, "{sql}");
    }
}

/// How long there is trouble, in seconds.
fn trouble() -> Duration {
    let seconds = std::env::var("SQLSTREAMS_ORDER_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(10))
}

/// Processes that handle flaky messages are killed, frozen until others have taken their lanes, and started anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tb_100_order_holds_whatever_is_killed_or_frozen() {
    const KEYS: u64 = 100;
    const LEASE: Duration = Duration::from_secs(1);
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let retry =
        RetryPolicy::attempts(5).backoff(Duration::from_millis(20), 1.0, Duration::from_millis(20));
    stream.group("g").ordered().lease(LEASE).retry(retry).create().await.unwrap();
    let place = Place { url, stream: "s", group: "g" };
    let journal = journal::Journal::default();

    let begun = Instant::now();
    let producing = {
        let stream = stream.clone();
        tokio::spawn(async move {
            let producer = stream.producer();
            let mut next = 0;
            while begun.elapsed() < trouble() {
                let numbers: Vec<u64> = (next..next + 40).collect();
                let key = |n: u64| if n.is_multiple_of(10) { 0 } else { n % KEYS };
                let batch = numbers.iter().map(|n| Outgoing::new(n).key(format!("k{}", key(*n))));
                producer.send_all(batch).await.unwrap();
                next += 40;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            next
        })
    };
    let (mut number, mut frozen) = (0, 0);
    let mut killed: HashMap<u32, std::time::SystemTime> = HashMap::new();
    let mut start = || {
        number += 1;
        (number, Process::start(&place, 8, Script::Flaky(3_000), number, &journal))
    };
    let mut processes: Vec<(u32, Process)> = (0..4).map(|_| start()).collect();
    while begun.elapsed() < trouble() {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(100..400))).await;
        let at = fastrand::usize(0..processes.len());
        if fastrand::bool() {
            let (number, process) = std::mem::replace(&mut processes[at], start());
            process.kill();
            killed.insert(number, std::time::SystemTime::now());
        } else {
            processes[at].1.freeze();
            tokio::time::sleep(Duration::from_millis(fastrand::u64(200..2_000))).await;
            processes[at].1.thaw();
            frozen += 1;
        }
    }
    let messages = producing.await.unwrap();
    let settled = "SELECT sqlstreams.is_resolved(1, 1, sqlstreams.stream_head(1))::int::bigint";
    crate::support::until("all are done or dead", Duration::from_secs(60), async || {
        count(&db, settled).await == 1
    })
    .await;
    for (_, process) in processes {
        process.stop().await;
    }

    let dead: HashSet<u64> = {
        let sql = "SELECT m.payload::text::bigint FROM sqlstreams.exception_queue_1 AS e JOIN sqlstreams.message_log_1 AS m ON m.id = e.message_id";
        db.query(sql, &[]).await.unwrap().iter().map(|row| row.get::<_, i64>(0) as u64).collect()
    };
    let done = journal.payloads_of(What::Done);
    let lost = (0..messages).filter(|n| !done.contains(n) && !dead.contains(n)).count();
    println!(
        "{messages} messages, {} starts, {} killed, {frozen} frozen, {} dead",
        journal.of(What::Started).len(),
        killed.len(),
        dead.len()
    );
    assert_eq!(lost, 0);
    check_journal(&journal, &dead, |n| if n % 10 == 0 { 0 } else { n % KEYS });
}

/// Fails where a message began before the earlier ones of its key had ended well.
fn check_journal(journal: &journal::Journal, dead: &HashSet<u64>, key: impl Fn(u64) -> u64) {
    let mut entries = journal.entries();
    entries.sort_by_key(|entry| entry.at);
    let mut of_key: HashMap<u64, BTreeMap<u64, bool>> = HashMap::new();
    for entry in &entries {
        of_key
            .entry(key(entry.payload))
            .or_default()
            .insert(entry.payload, dead.contains(&entry.payload));
    }
    let mut wrong = 0;
    for entry in &entries {
        let messages = of_key.get_mut(&key(entry.payload)).unwrap();
        match entry.what {
            What::Started => {
                if let Some(before) = messages.range(..entry.payload).find(|(_, done)| !**done) {
                    println!("{entry:?} though {before:?} was not final");
                    wrong += 1;
                }
            }
            What::Done => {
                messages.insert(entry.payload, true);
            }
            What::Failed | What::Cancelled => {}
        }
    }
    assert_eq!(wrong, 0, "messages began before earlier ones of their key");
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_098_a_key_that_fails_holds_only_itself_up() {
    let (client, db) = client().await;
    let stream = keyed(&client, "s", 1_000, 10).await;
    let retry = RetryPolicy::attempts(100).backoff(
        Duration::from_secs(3600),
        1.0,
        Duration::from_secs(3600),
    );
    let group = stream.group("g").ordered().retry(retry).create().await.unwrap();
    let stop = CancellationToken::new();
    let handled = Arc::new(Mutex::new(Vec::new()));
    let noted = handled.clone();
    let consumer = group.consumer().concurrency(8).stop_on(stop.clone());
    let consuming = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
        let fails = message.payload == 333;
        if !fails {
            noted.lock().unwrap().push(message.payload);
        }
        std::future::ready(if fails { Err("not today") } else { Ok(()) })
    }));
    // Of key 3 those before 333, of the others all.
    eventually(async || handled.lock().unwrap().len() == 900 + 33).await;
    send(&stream, 1_000, 10).await;
    eventually(async || handled.lock().unwrap().len() == 1_800 + 33).await;
    // One row for each of that key's messages that wait, and none besides.
    eventually(async || {
        let waiting = "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'deferred' AND key = 'k3'";
        count(&db, waiting).await == 66 + 100
    })
    .await;
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 167);
    let status = group.status().await.unwrap();
    assert_eq!((status.ready, status.deferred, status.mode), (1, 166, Mode::Ordered));
    stop.cancel();
    consuming.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redriven_message_takes_its_place_before_those_that_wait() {
    let (client, db) = client().await;
    let stream = keyed(&client, "s", 4, 1).await;
    let group = stream.group("g").ordered().retry(at_once(1)).create().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let run = async |fails: &'static [u64]| {
        let noted = order.clone();
        let consumer = group.consumer().concurrency(4).until_caught_up();
        let consumed = consumer.run(move |message: Delivery<u64>| {
            noted.lock().unwrap().push(message.payload);
            let wrong = fails.contains(&message.payload);
            std::future::ready(if wrong { Err("no") } else { Ok(()) })
        });
        consumed.await.unwrap();
        std::mem::take(&mut *order.lock().unwrap())
    };
    // Two are dead, and hold nobody up.
    assert_eq!(run(&[0, 2]).await, [0, 1, 2, 3]);
    assert_eq!(group.redrive(None, 10).await.unwrap(), [1, 3]);
    assert_eq!(run(&[]).await, [0, 2]);
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_without_a_key_wait_for_nobody() {
    let (client, _) = client().await;
    let stream = crate::support::numbers(&client, "s", 32).await;
    let all = Arc::new(tokio::sync::Barrier::new(32));
    let consumer = stream.group("g").ordered().consumer().concurrency(32).until_caught_up();
    let consumed = consumer.run(move |_: Delivery<u64>| {
        let all = all.clone();
        async move {
            all.wait().await;
        }
    });
    let consumed = tokio::time::timeout(Duration::from_secs(60), consumed).await;
    assert_eq!(consumed.expect("they wait for each other").unwrap().handled, 32);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_mode_changes_only_while_nothing_is_handed_out_and_running_consumers_follow() {
    let (client, _) = client().await;
    let stream = keyed(&client, "s", 1_000, 7).await;
    let group = stream.group("g").create().await.unwrap();
    let (stop, hold) = (CancellationToken::new(), Arc::new(tokio::sync::Semaphore::new(0)));
    let handled = Arc::new(Mutex::new(Vec::new()));
    let (noted, held) = (handled.clone(), hold.clone());
    let consumer = group.consumer().concurrency(4).stop_on(stop.clone());
    let consuming = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
        let (noted, held) = (noted.clone(), held.clone());
        async move {
            let _may = held.acquire().await.unwrap();
            noted.lock().unwrap().push(message.payload);
        }
    }));
    eventually(async || group.status().await.unwrap().open_leases > 0).await;
    let busy = group.set_mode(Mode::Ordered).await.unwrap_err();
    assert_eq!(busy.kind(), sqlstreams::ErrorKind::GroupBusy);
    hold.add_permits(1_000);
    eventually(async || handled.lock().unwrap().len() == 1_000).await;
    for (mode, all) in [(Mode::Ordered, 2_000), (Mode::Parallel, 3_000), (Mode::Ordered, 4_000)] {
        eventually(async || group.set_mode(mode).await.is_ok()).await;
        assert_eq!(group.mode().await.unwrap(), mode);
        send(&stream, 1_000, 7).await;
        eventually(async || handled.lock().unwrap().len() == all).await;
    }
    stop.cancel();
    assert_eq!(consuming.await.unwrap().unwrap().handled, 4_000);
}

/// Lanes that are behind when a group becomes parallel are read all the same.
#[tokio::test(flavor = "multi_thread")]
async fn lanes_that_are_behind_are_not_passed_over_by_a_change_of_mode() {
    let (client, db) = client().await;
    let stream = keyed(&client, "s", 1_000, 100).await;
    let group = stream.group("g").ordered().create().await.unwrap();
    // As if half of the lanes had been read up to 600.
    db.batch_execute(
        "SET search_path = sqlstreams; UPDATE consumer_group_cursor_1 SET cohorts = move_lanes(cohorts, x'00000000ffffffff'::bigint, 600)",
    )
    .await
    .unwrap();
    group.set_mode(Mode::Parallel).await.unwrap();
    let consumer = group.consumer().until_caught_up();
    let handled = consumer.run(async |_: Delivery<u64>| {}).await.unwrap().handled;
    let skipped = "SELECT count(*) FROM sqlstreams.message_log_1 WHERE id <= 600 AND sqlstreams.lane_of(key, id) < 32";
    assert_eq!(handled as i64, 1_000 - count(&db, skipped).await);
}

/// What a claim touches, in pages of the buffer cache.
async fn pages_of_a_claim(db: &tokio_postgres::Client) -> f64 {
    let claim = "SELECT sqlstreams.advance_lanes(1, 1, gen_random_uuid(), NULL, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
                                        '{}', '{}', '{}', '{}', '{}', '{}', 500, false, gen_random_uuid())";
    let mut samples = Vec::new();
    for _ in 0..7 {
        db.batch_execute("BEGIN").await.unwrap();
        samples.push(buffers(db, claim).await);
        db.batch_execute("ROLLBACK").await.unwrap();
    }
    middle(samples)
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_102_a_claim_costs_the_same_however_many_keys_wait() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.group("g").ordered().create().await.unwrap();
    send(&stream, 2_000, 1_000).await;
    let few = pages_of_a_claim(&db).await;
    send(&stream, 200_000, 50_000).await;
    let many = pages_of_a_claim(&db).await;
    println!("{few} pages with 1,000 keys, {many} with 50,000");
    assert!(many < few * 1.5 + 100.0, "{few} pages with 1,000 keys, {many} with 50,000");
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_102_a_claim_costs_the_same_however_many_keys_have_failed() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    stream.group("g").ordered().create().await.unwrap();
    send(&stream, 50_000, 50_000).await;
    let fail = async |from: i64, to: i64| {
        let sql = format!(
            "INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, attempts, due_at, key, lane)
             SELECT 1, id, 'ready', 1, now() - interval '1 minute', key, sqlstreams.lane_of(key, id) FROM sqlstreams.message_log_1 WHERE id BETWEEN {from} AND {to};
             ANALYZE sqlstreams.exception_queue_1"
        );
        db.batch_execute(&sql).await.unwrap();
    };
    fail(1, 2_000).await;
    let few = pages_of_a_claim(&db).await;
    fail(2_001, 50_000).await;
    let many = pages_of_a_claim(&db).await;
    println!("{few} pages with 2,000 that have failed, {many} with 50,000");
    assert!(many < few * 2.0, "{few} pages with 2,000 that have failed, {many} with 50,000");
}

/// What handlers write is there once and in order, though consumers are dropped and leases end.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn transactional_handlers_write_each_message_once_and_in_order() {
    const MESSAGES: u64 = 1_500;
    const KEYS: u64 = 20;
    let url = database().await;
    let (client, db) = client_at(&url).await;
    db.batch_execute("CREATE TABLE effect (at bigserial, key text, message bigint)").await.unwrap();
    let stream = keyed(&client, "s", MESSAGES, KEYS).await;
    let retry = RetryPolicy::attempts(1_000).backoff(
        Duration::from_millis(20),
        1.0,
        Duration::from_millis(20),
    );
    let lease = Duration::from_secs(1);
    stream.group("g").ordered().lease(lease).retry(retry).create().await.unwrap();
    let stop = CancellationToken::new();
    let workers: Vec<_> = (0..3)
        .map(|_| {
            let (url, stop) = (url.clone(), stop.clone());
            tokio::spawn(async move {
                while !stop.is_cancelled() {
                    let client = Client::builder(&url).pool_size(6).connect().await.unwrap();
                    let group = client.stream::<u64>("s").open().await.unwrap().group("g");
                    let consumer = group.consumer().concurrency(4).stop_on(stop.clone());
                    let run = consumer.run_transactional(
                        async |message: Delivery<u64>, tx: sqlstreams::Transaction| {
                            let insert = "INSERT INTO effect (key, message) VALUES ($1, $2)";
                            tx.execute(insert, &[&message.key, &message.id])
                                .await
                                .map_err(|e| e.to_string())?;
                            match fastrand::u8(..) {
                                0..12 => Err("by chance".to_owned()),
                                12..40 => {
                                    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..30)))
                                        .await;
                                    Ok(())
                                }
                                _ => Ok(()),
                            }
                        },
                    );
                    let life = Duration::from_millis(fastrand::u64(500..4_000));
                    // Dropped in the middle of whatever it does.
                    if let Ok(ended) = tokio::time::timeout(life, run).await {
                        ended.unwrap();
                    }
                }
            })
        })
        .collect();
    crate::support::until("all are handled", Duration::from_secs(90), async || {
        count(&db, "SELECT count(DISTINCT message) FROM effect").await as u64 == MESSAGES
    })
    .await;
    stop.cancel();
    for worker in workers {
        worker.await.unwrap();
    }
    let doubled = "SELECT count(*) - count(DISTINCT message) FROM effect";
    assert_eq!(count(&db, doubled).await, 0);
    let back = "SELECT count(*) FROM (SELECT message < lag(message) OVER (PARTITION BY key ORDER BY at) AS back FROM effect) AS x WHERE back";
    assert_eq!(count(&db, back).await, 0);
    for sql in [
        "SELECT count(*) FROM sqlstreams.exception_queue_1",
        "SELECT count(*) FROM sqlstreams.consumer_done_1",
    ] {
        assert_eq!(count(&db, sql).await, 0, "{sql}");
    }
}

/// What is not for the group neither waits nor runs, whatever its key is.
#[tokio::test(flavor = "multi_thread")]
async fn an_ordered_group_with_bindings_keeps_order_among_what_is_for_it() {
    let (client, db) = client().await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let numbers: Vec<u64> = (0..2_000).collect();
    let routing = |n: &u64| if n.is_multiple_of(3) { "a.b" } else { "c" };
    let all = numbers
        .iter()
        .map(|n| Outgoing::new(n).key(format!("k{}", n % 20)).routing_key(routing(n)));
    stream.producer().send_all(all).await.unwrap();
    let journal = Arc::new(Journal::default());
    let noted = journal.clone();
    let consumer = stream.group("g").ordered().bind("a.*").retry(at_once(2)).consumer();
    let consumed = consumer
        .concurrency(8)
        .until_caught_up()
        .run(move |message: Delivery<u64>| {
            let noted = noted.clone();
            async move {
                assert_eq!(message.payload % 3, 0);
                let (id, key) = (message.id, message.key.clone().unwrap());
                let run = fastrand::u64(..);
                noted.note(Event::Began { run, id, key });
                tokio::task::yield_now().await;
                let ok = message.payload % 60 != 6 || message.attempt() > 1;
                noted.note(Event::Ended { run, id, ok });
                if ok { Ok(()) } else { Err("once") }
            }
        })
        .await
        .unwrap();
    assert_eq!((consumed.handled, consumed.failed), (667, 34));
    check_order(&journal.events(), &HashSet::new());
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
}
