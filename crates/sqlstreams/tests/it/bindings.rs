//! Groups with bindings through the crate: setting and asking for them, and consuming while they change.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};
use sqlstreams::{
    Binding, CancellationToken, Client, Delivery, ErrorKind, Headers, RetryPolicy, Start,
};
use tokio::time::sleep;
use uuid::Uuid;

use crate::plain::installed;
use crate::reference::{Sample, is_for};
use crate::routing::{routed, send};
use crate::support::{client, connect, count, database, eventually, numbers};

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

/// Claims that are wide enough to ask the fence wait for writers like any others.
#[tokio::test(flavor = "multi_thread")]
async fn a_wide_claim_passes_over_no_late_commit() {
    let url = database().await;
    let plain = installed(&url).await;
    let (stream, group) = (plain.stream, plain.group);
    plain.db.query("SELECT sqlstreams.bind($1, $2, 'rare')", &[&stream, &group]).await.unwrap();
    let many = async |db: &tokio_postgres::Client| {
        let sql = "INSERT INTO sqlstreams.message_log_1 (routing_key, payload) SELECT 'often', '1' FROM generate_series(1, 60000)";
        db.batch_execute(sql).await.unwrap();
    };
    let claim_all = async || {
        let mut found = Vec::new();
        loop {
            let sql = "SELECT token, looked_at FROM sqlstreams.advance($1, $2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 10, p_width => 50000)";
            let row = plain.db.query_one(sql, &[&stream, &group]).await.unwrap();
            match row.get(0) {
                Some(token) => found.extend(plain.try_fetch(token).await.unwrap()),
                None => return found,
            }
        }
    };
    let writer = connect(&url).await;
    many(&plain.db).await;
    writer.batch_execute("BEGIN").await.unwrap();
    let late = "INSERT INTO sqlstreams.message_log_1 (routing_key, payload) VALUES ('rare', '2') RETURNING id";
    let late: i64 = writer.query_one(late, &[]).await.unwrap().get(0);
    many(&plain.db).await;
    let claimed =
        "SELECT claimed FROM sqlstreams.consumer_group_cursor_1 ORDER BY generation DESC LIMIT 1";
    for _ in 0..5 {
        assert!(claim_all().await.is_empty());
        assert_eq!(count(&plain.db, claimed).await, late - 1);
        plain.let_look().await;
    }
    writer.batch_execute("COMMIT").await.unwrap();
    plain.let_look().await;
    assert_eq!(claim_all().await, [late]);
    assert_eq!(count(&plain.db, claimed).await, 120_001);
}
