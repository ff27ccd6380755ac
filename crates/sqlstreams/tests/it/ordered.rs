//! Ordered groups: messages of one key one at a time, in id order, whatever fails or dies.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlstreams::{CancellationToken, Client, Delivery, Mode, Outgoing, RetryPolicy, Stream};

use crate::support::{client, connect, count, database, eventually};

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
    for sql in [
        "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state <> 'dead'",
        "SELECT count(*) FROM sqlstreams.consumer_lease_1",
    ] {
        assert_eq!(count(&db, sql).await, 0, "{sql}");
    }
}
