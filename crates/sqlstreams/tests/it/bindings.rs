//! Bindings that change: every id is judged by the set that held when it was claimed first, whoever has it in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};
use sqlstreams::{
    Binding, CancellationToken, Client, Delivery, ErrorKind, Headers, Outcome, Outgoing,
    RetryPolicy, Start, Stream,
};
use tokio::time::sleep;
use uuid::Uuid;

use crate::plain::{Plain, installed};
use crate::reference::{Sample, is_for};
use crate::routing::send;
use crate::support::{client, connect, count, database, eventually, numbers};

/// Routing keys and bindings that have to do with each other.
const KEYS: [Option<&str>; 7] =
    [None, Some("a"), Some("a.b"), Some("b"), Some("c.b"), Some("c"), Some("a.c.b")];

fn some_bindings(random: &mut Rng) -> Vec<Value> {
    let all = [
        json!("a.#"),
        json!("#.b"),
        json!("*"),
        json!("c.*"),
        json!("#"),
        json!("none"),
        json!({"headers": {"x": 1}}),
    ];
    let mut some = all.to_vec();
    random.shuffle(&mut some);
    // Now and then none at all: everything is for the group.
    some.truncate(random.usize(0..3));
    some
}

fn sample(random: &mut Rng) -> Sample {
    Sample {
        routing_key: KEYS[random.usize(0..KEYS.len())].map(str::to_owned),
        headers: random.bool().then(|| json!({"x": random.i32(0..2)})),
    }
}

/// A group, what was sent to it, and by what each id is to be judged.
struct Walk {
    plain: Plain,
    random: Rng,
    sent: BTreeMap<i64, Sample>,
    /// The cursor at each change, read beside it, and the bindings from there on.
    sets: Vec<(i64, Vec<Value>)>,
    leases: Vec<Leased>,
    exceptions: Vec<(Uuid, i64)>,
    handled: BTreeSet<i64>,
    suspects: usize,
}

/// A lease: what of it was fetched and not finished, and how far.
#[derive(Debug, Clone)]
struct Leased {
    seq: i64,
    token: Uuid,
    open: BTreeSet<i64>,
    fetched_to: i64,
}

impl Walk {
    fn is_for(&self, id: i64) -> bool {
        let set = self.sets.iter().rev().find(|(after, _)| *after < id);
        set.is_none_or(|(_, bindings)| is_for(bindings, &self.sent[&id]))
    }

    #[track_caller]
    fn received(&self, id: i64) {
        assert!(self.is_for(id), "{id} is not for the group: {:?}", self.sent[&id]);
        assert!(!self.handled.contains(&id), "{id} was handled");
    }

    async fn step(&mut self) {
        match self.random.u32(0..20) {
            0..3 => {
                let samples: Vec<Sample> =
                    (0..self.random.usize(1..20)).map(|_| sample(&mut self.random)).collect();
                let ids = send(&self.plain, &samples).await;
                self.sent.extend(std::iter::zip(ids, samples));
            }
            3..5 => self.change().await,
            5..9 => self.claim().await,
            9..12 => self.fetch().await,
            12..15 => self.settle().await,
            15 => self.release().await,
            16 => {
                // All leases run out.
                let sql = format!("UPDATE {} SET expires_at = now()", self.plain.leases());
                self.plain.db.batch_execute(&sql).await.unwrap();
            }
            17 => self.fail().await,
            _ => self.exceptions().await,
        }
    }

    async fn change(&mut self) {
        let bindings = some_bindings(&mut self.random);
        let text = Value::from(bindings.clone()).to_string();
        let db = &self.plain.db;
        db.batch_execute("BEGIN").await.unwrap();
        let set = "SELECT sqlstreams.set_bindings($1, $2, $3::text::jsonb)";
        let row = db.query_one(set, &[&self.plain.stream, &self.plain.group, &text]).await.unwrap();
        if row.get(0) {
            let sql = format!(
                "SELECT claimed FROM sqlstreams.consumer_group_cursor_{} WHERE group_id = {} ORDER BY generation DESC LIMIT 1",
                self.plain.stream, self.plain.group
            );
            self.sets.push((count(db, &sql).await, bindings));
        }
        db.batch_execute("COMMIT").await.unwrap();
    }

    async fn claim(&mut self) {
        let width = self.random.bool().then(|| self.random.i64(1..60));
        let limit = self.random.i64(1..12);
        let sql = "SELECT seq, token FROM sqlstreams.advance($1, $2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', $3, p_width => $4)";
        let row = self
            .plain
            .db
            .query_one(sql, &[&self.plain.stream, &self.plain.group, &limit, &width])
            .await
            .unwrap();
        if let Some(seq) = row.get(0) {
            let lease = Leased { seq, token: row.get(1), open: BTreeSet::new(), fetched_to: 0 };
            self.leases.push(lease);
        }
    }

    fn pick(&mut self) -> Option<usize> {
        (!self.leases.is_empty()).then(|| self.random.usize(0..self.leases.len()))
    }

    async fn fetch(&mut self) {
        let Some(i) = self.pick() else { return };
        let (token, after) = (self.leases[i].token, self.leases[i].fetched_to - 1);
        let limit = self.random.i64(1..8);
        let sql = "SELECT id, more FROM sqlstreams.fetch($1, $2, $3, $4, $5, 1000000, NULL::json)";
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
            [&self.plain.stream, &self.plain.group, &token, &after, &limit];
        let rows = self.plain.db.query(sql, &params).await.unwrap();
        for row in &rows {
            self.received(row.get(0));
            self.leases[i].open.insert(row.get(0));
        }
        let last = rows.last().filter(|row| row.get(1)).map(|row| row.get::<_, i64>(0));
        self.leases[i].fetched_to = last.map_or(i64::MAX, |last| last + 1);
    }

    /// Finishes some of what is open in a lease, as consumers do: what was fetched over and did not come is done, too.
    async fn settle(&mut self) {
        let Some(i) = self.pick() else { return };
        let lease = self.leases[i].clone();
        let share = self.random.u32(0..5);
        let done: BTreeSet<i64> =
            lease.open.iter().copied().filter(|_| self.random.u32(0..4) < share).collect();
        let open: Vec<String> =
            lease.open.difference(&done).map(|id| format!("[{id},{id}]")).collect();
        let sql = "SELECT sqlstreams.settle($1, $2, $3, $4, int8multirange(int8range(0, $5)) - $6::text::int8multirange)";
        let row = self
            .plain
            .db
            .query_one(
                sql,
                &[
                    &self.plain.stream,
                    &self.plain.group,
                    &lease.seq,
                    &lease.token,
                    &lease.fetched_to,
                    &format!("{{{}}}", open.join(",")),
                ],
            )
            .await
            .unwrap();
        if row.get(0) {
            self.handled.extend(&done);
            self.leases[i].open.retain(|id| !done.contains(id));
        }
        if !row.get::<_, bool>(0) || self.leases[i].open.is_empty() && lease.fetched_to == i64::MAX
        {
            self.leases.remove(i);
        }
    }

    async fn fail(&mut self) {
        let Some(i) = self.pick() else { return };
        let lease = self.leases[i].clone();
        let Some(id) = lease.open.first().copied() else { return };
        let sql =
            "SELECT sqlstreams.fail($1, $2, $3, $4, ARRAY[$5::bigint], '{retry}', '{no}', '{0}')";
        let row = self
            .plain
            .db
            .query_one(sql, &[&self.plain.stream, &self.plain.group, &lease.seq, &lease.token, &id])
            .await
            .unwrap();
        if row.get(0) {
            self.leases[i].open.remove(&id);
        } else {
            self.leases.remove(i);
        }
    }

    async fn release(&mut self) {
        let Some(i) = self.pick() else { return };
        let lease = self.leases.remove(i);
        let (db, stream, group) = (&self.plain.db, self.plain.stream, self.plain.group);
        if self.random.bool() {
            let sql =
                "SELECT sqlstreams.release($1, $2, ARRAY[$3::bigint], ARRAY[$4::uuid], '{\"{}\"}')";
            db.query(sql, &[&stream, &group, &lease.seq, &lease.token]).await.unwrap();
        } else {
            let from = self.random.i64(1..2 + self.sent.len() as i64);
            let sql = "SELECT sqlstreams.release_part($1, $2, $3, $4, int8multirange(int8range($5, NULL)))";
            db.query(sql, &[&stream, &group, &lease.seq, &lease.token, &from]).await.unwrap();
        }
    }

    async fn exceptions(&mut self) {
        let suspect = self.random.bool();
        let (token, ids) = self.plain.claim_exceptions(5, suspect).await;
        self.suspects += if suspect { ids.len() } else { 0 };
        for id in &ids {
            self.received(*id);
        }
        self.exceptions.extend(ids.iter().map(|id| (token, *id)));
        for (token, id) in std::mem::take(&mut self.exceptions) {
            let lost = self.plain.settle_exceptions(token, &[(id, "ok", None)]).await;
            if lost.is_empty() {
                self.handled.insert(id);
            }
        }
    }

    /// Runs everything to its end.
    async fn finish(&mut self) {
        self.leases.clear();
        let sql = format!("UPDATE {} SET expires_at = '-infinity'", self.plain.leases());
        self.plain.db.batch_execute(&sql).await.unwrap();
        let resolved = "SELECT sqlstreams.is_resolved($1, $2, sqlstreams.stream_head($1))";
        let (stream, group) = (self.plain.stream, self.plain.group);
        for _ in 0..100_000 {
            if self.plain.db.query_one(resolved, &[&stream, &group]).await.unwrap().get(0) {
                return;
            }
            self.claim().await;
            self.fetch().await;
            self.settle().await;
            self.exceptions().await;
        }
        panic!("it does not end");
    }
}

/// In any order of changes, claims, pages, settlements, failures, releases, losses and suspects.
#[tokio::test(flavor = "multi_thread")]
async fn each_id_is_judged_by_the_bindings_it_was_claimed_under() {
    let seed =
        std::env::var("SQLSTREAMS_SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    println!("SQLSTREAMS_SEED={seed}");
    let (mut changes, mut suspects) = (0, 0);
    for walk in 0..4 {
        let plain = installed(&database().await).await;
        plain
            .db
            .batch_execute("UPDATE sqlstreams.consumer_group SET max_reclaims = 1")
            .await
            .unwrap();
        let mut walk = Walk {
            plain,
            random: Rng::with_seed(seed.wrapping_add(walk)),
            sent: BTreeMap::new(),
            sets: Vec::new(),
            leases: Vec::new(),
            exceptions: Vec::new(),
            handled: BTreeSet::new(),
            suspects: 0,
        };
        for _ in 0..400 {
            walk.step().await;
        }
        walk.finish().await;
        let expected: BTreeSet<i64> =
            walk.sent.keys().copied().filter(|id| walk.is_for(*id)).collect();
        assert_eq!(walk.handled, expected, "seed {seed}");
        assert_eq!(
            count(&walk.plain.db, &format!("SELECT count(*) FROM {}", walk.plain.exceptions()))
                .await,
            0
        );
        // What the history says is what was seen beside each change.
        let sql = "SELECT after_id FROM sqlstreams.binding_history ORDER BY version";
        let rows = walk.plain.db.query(sql, &[]).await.unwrap();
        let told: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        assert_eq!(told, walk.sets.iter().map(|(after, _)| *after).collect::<Vec<_>>());
        changes += told.len();
        suspects += walk.suspects;
    }
    println!("{changes} changes, {suspects} suspects");
    assert!(changes > 40 && suspects > 0, "the walks say little: {changes}, {suspects}");
}

/// Sends numbers, each tenth with routing key `rare.N`, the others with `often.N`.
async fn routed(
    client: &Client,
    name: &str,
    numbers: std::ops::Range<u64>,
    each: u64,
) -> Stream<u64> {
    let stream = client.stream::<u64>(name).create_if_missing().await.unwrap();
    let numbers: Vec<u64> = numbers.collect();
    for batch in numbers.chunks(10_000) {
        let messages = batch.iter().map(|n| {
            let word = if n.is_multiple_of(each) { "rare" } else { "often" };
            Outgoing::new(n).routing_key(format!("{word}.{}", n % 3))
        });
        stream.producer().send_all(messages).await.unwrap();
    }
    stream
}

/// While consumers run, some of which are killed, with failures, and now and then a limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn bindings_change_under_running_consumers() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = routed(&client, "s", 0..20_000, 10).await;
    let policy = RetryPolicy::attempts(1000).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    let group = stream.group("g").lease(Duration::from_secs(1)).retry(policy).bind("rare.#");
    let group = group.create().await.unwrap();

    let received: Arc<Mutex<BTreeMap<i64, Option<String>>>> = Arc::default();
    let stop = CancellationToken::new();
    let start = async |consumers: &mut Vec<_>| {
        let client = Client::connect(&url).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let received = received.clone();
        let consumer = stream.group("g").consumer().concurrency(8).stop_on(stop.clone());
        let running = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            received.lock().unwrap().insert(message.id, message.routing_key.clone());
            let fails = message.payload.is_multiple_of(7) && message.attempt() == 1;
            async move {
                sleep(Duration::from_micros(200)).await;
                if fails { Err("once") } else { Ok(()) }
            }
        }));
        consumers.push(running);
    };
    let mut consumers = Vec::new();
    start(&mut consumers).await;
    start(&mut consumers).await;
    let mut random = Rng::new();
    let producing = AtomicBool::new(true);
    tokio::join!(
        async {
            for batch in 1..30_u64 {
                routed(&client, "s", batch * 1_000_000..batch * 1_000_000 + 2_000, 10).await;
                sleep(Duration::from_millis(30)).await;
            }
            producing.store(false, Ordering::SeqCst);
        },
        async {
            while producing.load(Ordering::SeqCst) {
                let bindings: &[&str] = match random.u32(0..6) {
                    0 => &["often.1", "rare.*"],
                    1 => &["*.2"],
                    2 => &["nothing"],
                    3 => &[],
                    _ => &["rare.#"],
                };
                group.set_bindings(bindings.iter().map(|b| Binding::from(*b))).await.unwrap();
                let limit = [0, 0, 5, 40][random.usize(0..4)];
                stream.group("g").max_in_flight(limit).open().await.unwrap();
                sleep(Duration::from_millis(random.u64(5..60))).await;
            }
        },
        async {
            while producing.load(Ordering::SeqCst) {
                sleep(Duration::from_millis(250)).await;
                consumers.swap_remove(fastrand::usize(0..consumers.len())).abort();
                start(&mut consumers).await;
            }
        }
    );
    stream.group("g").max_in_flight(0).open().await.unwrap();
    let db = connect(&url).await;
    let resolved = format!(
        "SELECT sqlstreams.is_resolved({0}, {1}, sqlstreams.stream_head({0}))::int::bigint",
        stream.id(),
        group.id()
    );
    eventually(async || count(&db, &resolved).await == 1).await;
    stop.cancel();
    for consumer in consumers {
        consumer.await.unwrap().unwrap();
    }

    let history = group.binding_history().await.unwrap();
    assert!(history.len() > 5, "{}", history.len());
    let sets: Vec<(i64, Vec<Value>)> = history
        .iter()
        .map(|set| {
            (set.after_id, set.bindings.iter().map(|b| b.pattern().unwrap().into()).collect())
        })
        .collect();
    let received = std::mem::take(&mut *received.lock().unwrap());
    let sql = format!("SELECT id, routing_key FROM sqlstreams.message_log_{}", stream.id());
    let mut expected = BTreeMap::new();
    for row in db.query(&sql, &[]).await.unwrap() {
        let (id, routing_key): (i64, Option<String>) = (row.get(0), row.get(1));
        let set = sets.iter().rev().find(|(after, _)| *after < id);
        let sample = Sample { routing_key: routing_key.clone(), headers: None };
        if set.is_none_or(|(_, bindings)| is_for(bindings, &sample)) {
            expected.insert(id, routing_key);
        }
    }
    println!("{} changes, {} of 78,000 messages", history.len(), expected.len());
    assert_eq!(received.len(), expected.len());
    assert!(received == expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn bindings_are_set_added_removed_and_remembered() {
    let (client, db) = client().await;
    let stream = routed(&client, "s", 0..30, 10).await;
    let group = stream.group("g").create().await.unwrap();
    assert_eq!(group.bindings().await.unwrap(), []);
    assert!(group.bind("rare.#").await.unwrap());
    assert!(!group.bind("rare.#.#").await.unwrap(), "the same in normal form");
    let eu = Binding::headers([("region", "eu")]);
    assert!(group.bind(eu.clone()).await.unwrap());
    assert_eq!(group.bindings().await.unwrap(), [eu.clone(), "rare.#".into()]);
    assert!(!group.unbind("other").await.unwrap());
    assert!(group.unbind(eu.clone()).await.unwrap());
    let error = group.unbind("rare.#").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidBinding);
    assert!(error.to_string().contains("receives everything"), "{error}");
    let wanted = Binding::from("a.*").header("n", json!({"deep": [1]}));
    assert!(group.set_bindings([wanted.clone(), wanted.clone()]).await.unwrap());
    assert!(!group.set_bindings([wanted.clone()]).await.unwrap());
    assert_eq!(group.bindings().await.unwrap(), [wanted]);
    assert!(group.set_bindings([]).await.unwrap());
    assert_eq!(group.bindings().await.unwrap(), []);

    let history = group.binding_history().await.unwrap();
    let versions: Vec<i32> = history.iter().map(|set| set.version).collect();
    assert_eq!(versions, [1, 2, 3, 4, 5]);
    assert!(history.iter().all(|set| set.after_id == 0 && set.changed_by == "postgres"));
    assert!(history.is_sorted_by_key(|set| set.changed_at));
    let audited = "SELECT count(*) FROM sqlstreams.audit WHERE action = 'set_bindings' AND group_name = 'g' AND actor = 'postgres'
                   AND detail ? 'before' AND detail ? 'bindings' AND detail ? 'after_id'";
    assert_eq!(count(&db, audited).await, 5);

    // Opened with others it takes those over; with the same, or with none named, nothing happens.
    for _ in 0..2 {
        stream.group("g").bind("often.1").bind("rare.0").create_if_missing().await.unwrap();
        stream.group("g").open().await.unwrap();
    }
    assert_eq!(group.bindings().await.unwrap(), ["often.1".into(), "rare.0".into()]);
    assert_eq!(group.binding_history().await.unwrap().len(), 6);
    group.drop_group().await.unwrap();
    assert_eq!(count(&db, "SELECT count(*) FROM sqlstreams.binding_set").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_test_tells_who_would_receive_a_message_and_why() {
    let (client, _db) = client().await;
    let stream = numbers(&client, "s", 0).await;
    stream.group("all").create().await.unwrap();
    stream.group("created").bind("*.created").bind("orders.#").create().await.unwrap();
    stream.group("eu").bind(Binding::headers([("region", "eu")])).create().await.unwrap();
    let told = async |key: Option<&str>, headers: Value| {
        let headers: Headers = headers.as_object().unwrap().clone();
        let reached = stream.test_bindings(key, &headers).await.unwrap();
        let told: Vec<String> = reached
            .iter()
            .map(|r| {
                format!(
                    "{}: {}",
                    r.group,
                    r.binding.as_ref().map_or("-".into(), Binding::to_string)
                )
            })
            .collect();
        told.join(", ")
    };
    assert_eq!(told(None, json!({})).await, "all: -");
    assert_eq!(
        told(Some("orders.created"), json!({})).await,
        "all: -, created: *.created, created: orders.#"
    );
    assert_eq!(
        told(Some("x"), json!({"region": "eu", "n": 1})).await,
        r#"all: -, eu: {"headers":{"region":"eu"}}"#
    );
}

/// A range of ids that was claimed under other bindings keeps them, and a version lives as long as it is needed.
#[tokio::test(flavor = "multi_thread")]
async fn only_a_bounded_number_of_versions_is_kept() {
    let plain = installed(&database().await).await;
    let keyed = |key: &str| Sample { routing_key: Some(key.to_owned()), headers: None };
    let set = async |bindings: &str| {
        let sql = "SELECT sqlstreams.set_bindings($1, $2, $3::text::jsonb)";
        plain.db.query(sql, &[&plain.stream, &plain.group, &bindings]).await.unwrap();
    };
    let versions = "SELECT count(*) FROM sqlstreams.binding_set";
    set(r#"["a"]"#).await;
    let first = send(&plain, &[keyed("a"), keyed("b"), keyed("a")]).await;
    let sql = "SELECT token FROM sqlstreams.advance($1, $2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 2, p_width => 2)";
    let token: Uuid = plain.db.query_one(sql, &[&plain.stream, &plain.group]).await.unwrap().get(0);
    for n in 0..150 {
        set(&format!(r#"["b{n}"]"#)).await;
    }
    // The lease still needs the first.
    assert_eq!(count(&plain.db, versions).await, 151);
    assert_eq!(plain.try_fetch(token).await.unwrap(), [first[0]]);
    plain.db.batch_execute(&format!("DELETE FROM {}", plain.leases())).await.unwrap();
    set(r#"["a"]"#).await;
    assert_eq!(count(&plain.db, versions).await, 100);
    let oldest = "SELECT after_id FROM sqlstreams.binding_set ORDER BY version LIMIT 1";
    assert_eq!(count(&plain.db, oldest).await, 0);
    for n in 0..150 {
        set(&format!(r#"["c{n}"]"#)).await;
    }
    assert_eq!(count(&plain.db, versions).await, 100);
}

/// How many messages leases hold that run: in a group with a limit, each id is one.
const LEASED: &str = "SELECT coalesce((SELECT sum(upper(r) - lower(r)) FROM sqlstreams.consumer_lease_1, unnest(pending) AS r
                                       WHERE expires_at > clock_timestamp()), 0)::bigint
     + (SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'inflight' AND lease_expires_at > clock_timestamp())";

/// Runs consumers of group `g` whose handlers take `time` each, until all is handled; returns how many handlers ran at most
/// and what the tables said at most.
async fn gauge(url: &str, consumers: usize, time: Duration) -> (usize, usize, i64) {
    let (now, most, handled) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
    );
    let mut running = Vec::new();
    for _ in 0..consumers {
        let client = Client::connect(url).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let (now, most, handled) = (now.clone(), most.clone(), handled.clone());
        let consumer = stream.group("g").consumer().concurrency(4).until_caught_up();
        running.push(tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let (now, handled) = (now.clone(), handled.clone());
            async move {
                sleep(time).await;
                now.fetch_sub(1, Ordering::SeqCst);
                if message.payload.is_multiple_of(3) && message.attempt() == 1 {
                    return Outcome::Retry("once".into());
                }
                handled.fetch_add(1, Ordering::SeqCst);
                Outcome::Done
            }
        })));
    }
    let db = connect(url).await;
    let mut leased = 0;
    while !running.iter().all(tokio::task::JoinHandle::is_finished) {
        leased = leased.max(count(&db, LEASED).await);
        sleep(Duration::from_millis(2)).await;
    }
    for consumer in running {
        consumer.await.unwrap().unwrap();
    }
    (handled.load(Ordering::SeqCst), most.load(Ordering::SeqCst), leased)
}

/// The limit is exact: so many messages, not ids, and all of it is used.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn max_in_flight_counts_messages_that_are_for_the_group() {
    for (each, limit) in [(0, 6), (1, 6), (7, 6), (500, 3)] {
        let url = database().await;
        let client = Client::connect(&url).await.unwrap();
        let messages = 150 * each.max(1);
        let stream = routed(&client, "s", 0..messages, each.max(1)).await;
        let policy = RetryPolicy::attempts(3).backoff(Duration::ZERO, 1.0, Duration::ZERO);
        let mut group = stream.group("g").retry(policy).max_in_flight(limit);
        if each > 0 {
            group = group.bind("rare.*");
        }
        group.create().await.unwrap();
        let begun = std::time::Instant::now();
        let (handled, most, leased) = gauge(&url, 3, Duration::from_millis(20)).await;
        println!("1 in {each}, limit {limit}: {most} ran, {leased} leased, {:?}", begun.elapsed());
        assert_eq!((handled, most, leased), (150, limit as usize, i64::from(limit)), "1 in {each}");
        // 150 messages and 50 retries in turns of `limit`, each 20 ms, and not much more.
        let turns = 200 / limit + 1;
        let ideal = Duration::from_millis(20) * turns;
        assert!(
            begun.elapsed() < ideal * 3 + Duration::from_secs(5),
            "{:?}, ideal {ideal:?}",
            begun.elapsed()
        );
    }
}

/// A limit that is set while a wide range is held does not leave the others without work until that is done.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_limit_that_comes_later_counts_messages_as_well() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = routed(&client, "s", 0..30_000, 100).await;
    let group = stream.group("g").bind("rare.*").create().await.unwrap();
    // A process that died holds all of it, in one lease that has not run out.
    let db = connect(&url).await;
    let claim = format!(
        "SELECT sqlstreams.advance({}, {}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 100, p_width => 30000)",
        stream.id(),
        group.id()
    );
    db.batch_execute(&claim).await.unwrap();
    stream.group("g").max_in_flight(4).open().await.unwrap();
    db.batch_execute("UPDATE sqlstreams.consumer_lease_1 SET expires_at = clock_timestamp() + interval '500 milliseconds'").await.unwrap();
    sleep(Duration::from_millis(600)).await;
    let (handled, most, leased) = gauge(&url, 2, Duration::from_millis(5)).await;
    assert_eq!((handled, most, leased), (300, 4, 4));
    // By ids instead of messages it would be 7,500 claims of 4 ids.
    let claims = count(&db, "SELECT max(next_seq) FROM sqlstreams.consumer_group_cursor_1").await;
    assert!(claims < 900, "{claims} claims");
}

/// Sparse matches are found at the speed of ranges, and still only so many a second are handed out.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rate_limit_counts_messages_that_are_for_the_group() {
    const RATE: f64 = 200.0;
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let stream = routed(&client, "s", 0..40_000, 100).await;
    stream.group("g").rate_limit(RATE).bind("rare.*").create().await.unwrap();
    let begun = std::time::Instant::now();
    let (handled, _, _) = gauge(&url, 2, Duration::ZERO).await;
    let elapsed = begun.elapsed().as_secs_f64();
    // 400 and their retries: a third fails once.
    let started = 400.0 + 400.0 / 3.0;
    println!("{handled} in {elapsed:.2} s");
    assert_eq!(handled, 400);
    assert!(elapsed >= (started - RATE / 10.0) / RATE * 0.95, "{elapsed}");
    assert!(elapsed <= started / RATE * 3.0 + 5.0, "{elapsed}");
}

/// A dense part after a sparse one is shared: what one consumer cannot do soon it hands back.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_dense_part_after_a_sparse_one_is_shared() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    routed(&client, "s", 1..30_000, 1_000_000).await;
    let stream = routed(&client, "s", 1_000_000..1_000_400, 1).await;
    stream.group("g").bind("rare.*").create().await.unwrap();
    let by: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut running = Vec::new();
    for number in 0..2 {
        let client = Client::connect(&url).await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let by = by.clone();
        let consumer = stream.group("g").consumer().concurrency(4).until_caught_up();
        running.push(tokio::spawn(consumer.run(move |_: Delivery<u64>| {
            by.lock().unwrap().push(number);
            sleep(Duration::from_millis(20))
        })));
    }
    for consumer in running {
        consumer.await.unwrap().unwrap();
    }
    let by = by.lock().unwrap();
    let first = by.iter().filter(|n| **n == 0).count();
    println!("{first} and {}", by.len() - first);
    assert_eq!(by.len(), 400);
    assert!((100..=300).contains(&first), "{first} of 400");
}

/// An exception was for the group when it became one, and stays whatever the bindings become.
#[tokio::test(flavor = "multi_thread")]
async fn exceptions_outlive_the_bindings_they_came_by() {
    let (client, _db) = client().await;
    let stream = routed(&client, "s", 0..20, 10).await;
    let policy = RetryPolicy::attempts(1);
    let group = stream.group("g").retry(policy).bind("rare.*").create().await.unwrap();
    let consume = async |fails: bool| {
        let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
        let log = seen.clone();
        let consumer = group.consumer().until_caught_up();
        let handler = move |message: Delivery<u64>| {
            log.lock().unwrap().push(message.payload);
            async move { if fails { Err("no") } else { Ok(()) } }
        };
        consumer.run(handler).await.unwrap();
        let mut seen = seen.lock().unwrap().clone();
        seen.sort_unstable();
        seen
    };
    assert_eq!(consume(true).await, [0, 10]);
    group.set_bindings(["nothing".into()]).await.unwrap();
    routed(&client, "s", 100..120, 10).await;
    assert_eq!(group.redrive(None, 10).await.unwrap().len(), 2);
    assert_eq!(consume(false).await, [0, 10]);
    let status = group.status().await.unwrap();
    assert_eq!((status.lag, status.resolved, status.dead, status.open_leases), (0, 40, 0, 0));
}

/// A new group that starts late is bound from its start on; what it never was to receive it does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_starts_late_is_bound_from_there() {
    let (client, _db) = client().await;
    let stream = routed(&client, "s", 0..100, 10).await;
    let group = stream.group("g").start(Start::Latest).bind("rare.*").create().await.unwrap();
    routed(&client, "s", 100..200, 10).await;
    let consumed =
        group.consumer().until_caught_up().run(async |_: Delivery<u64>| ()).await.unwrap();
    assert_eq!(consumed.handled, 10);
}

/// Messages are fetched one by one where one of them cannot be read, and that is one of the group's.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_message_of_a_lease_is_one_of_the_groups() {
    let plain = installed(&database().await).await;
    let samples =
        ["b", "a", "b", "a"].map(|key| Sample { routing_key: Some(key.to_owned()), headers: None });
    let ids = send(&plain, &samples).await;
    let (stream, group) = (plain.stream, plain.group);
    let bind = "SELECT sqlstreams.bind($1, $2, 'a')";
    plain.db.query(bind, &[&stream, &group]).await.unwrap();
    let sql = "SELECT token FROM sqlstreams.advance($1, $2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 9, p_width => 9)";
    let token: Uuid = plain.db.query_one(sql, &[&stream, &group]).await.unwrap().get(0);
    for (after, next) in [(0, Some(ids[1])), (ids[1], Some(ids[3])), (ids[3], None)] {
        let sql = "SELECT sqlstreams.next_id($1, $2, $3, $4)";
        let row = plain.db.query_one(sql, &[&stream, &group, &token, &after]).await.unwrap();
        assert_eq!(row.get::<_, Option<i64>>(0), next);
    }
}

/// Messages that are not for the group leave no trace in the bookkeeping of handlers' transactions.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn effects_happen_exactly_once_for_what_is_bound() {
    let (client, db) = client().await;
    let stream = routed(&client, "s", 0..5_000, 10).await;
    db.batch_execute("CREATE TABLE effect (n bigint PRIMARY KEY)").await.unwrap();
    let policy = RetryPolicy::attempts(3).backoff(Duration::ZERO, 1.0, Duration::ZERO);
    let group = stream.group("g").retry(policy).bind("rare.*").create().await.unwrap();
    let consumer = group.consumer().concurrency(4).until_caught_up();
    let consumed = consumer.run_transactional(async |message, tx| {
        tx.execute("INSERT INTO effect VALUES ($1)", &[&(message.payload as i64)]).await.unwrap();
        match message.payload.is_multiple_of(30) && message.attempt() == 1 {
            true => Err("once"),
            false => Ok(()),
        }
    });
    assert_eq!(consumed.await.unwrap().handled, 500);
    let effects = "SELECT count(*) FROM effect WHERE n % 10 = 0";
    assert_eq!(count(&db, effects).await, 500);
    assert_eq!(count(&db, "SELECT count(*) FROM effect").await, 500);
    for table in ["consumer_done_1", "consumer_lease_1", "exception_queue_1"] {
        assert_eq!(
            count(&db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await,
            0,
            "{table}"
        );
    }
}

/// State stays flat: what is not for the group costs neither rows nor a claim for each.
#[tokio::test(flavor = "multi_thread")]
async fn a_sparse_binding_costs_few_claims_and_no_rows() {
    let (client, db) = client().await;
    let stream = routed(&client, "s", 1..100_001, 50_000).await;
    let group = stream.group("g").bind("rare.*").create().await.unwrap();
    let consumed =
        group.consumer().until_caught_up().run(async |_: Delivery<u64>| ()).await.unwrap();
    assert_eq!(consumed.handled, 2);
    let claims =
        "SELECT next_seq FROM sqlstreams.consumer_group_cursor_1 ORDER BY generation DESC LIMIT 1";
    let claims = count(&db, claims).await;
    // 16, 8 times as many each time up to 50,000, and what is left.
    assert!(claims < 20, "{claims} leases for 100,000 ids");
    let rows = "SELECT (SELECT count(*) FROM sqlstreams.consumer_lease_1) + (SELECT count(*) FROM sqlstreams.consumer_group_cursor_1)
              + (SELECT count(*) FROM sqlstreams.exception_queue_1)";
    assert_eq!(count(&db, rows).await, 1);
}
