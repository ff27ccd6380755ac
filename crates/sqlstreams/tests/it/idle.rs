//! What consumers cost while nothing happens, and while little does.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::Client;

use crate::proxy::Proxy;
use crate::running::Running;
use crate::support::{database, until};

/// So many statements are within the budget of so many seconds.
const PER_SECOND: usize = 2;

#[tokio::test(flavor = "multi_thread")]
async fn tb_125_fifty_idle_groups_cost_two_statements_a_second_at_most() {
    let url = database().await;
    let proxy = Proxy::start(&url).await;
    let client = Client::connect(&proxy.url).await.unwrap();
    let elsewhere = Client::connect(&url).await.unwrap();
    let (mut consumers, mut streams) = (Vec::new(), Vec::new());
    for s in 0..5 {
        let stream = client.stream::<u64>(format!("s{s}")).create().await.unwrap();
        for g in 0..10 {
            let group = stream.group(format!("g{g}")).create().await.unwrap();
            consumers.push(Running::start(&group));
        }
        streams.push(elsewhere.stream::<u64>(format!("s{s}")).open().await.unwrap());
    }
    for stream in &streams {
        stream.producer().send(&1).await.unwrap();
    }
    for consumer in &mut consumers {
        consumer.handles(1, Duration::from_secs(60)).await;
    }

    // It settles within seconds; the promise is a minute.
    let window = Duration::from_secs(3);
    until("they are quiet", Duration::from_secs(60), async || {
        let count = proxy.count();
        tokio::time::sleep(window).await;
        count.load(Ordering::SeqCst) <= 3 * PER_SECOND
    })
    .await;

    let sent = Arc::new(Mutex::new(BTreeMap::<String, usize>::new()));
    let log = sent.clone();
    proxy.set(move |statement| {
        *log.lock().unwrap().entry(statement.sql.to_owned()).or_default() += 1;
        None
    });
    let opened = proxy.connections();
    tokio::time::sleep(Duration::from_secs(6)).await;
    let sent = sent.lock().unwrap().clone();
    println!("in 6 s: {sent:?}");
    assert!(sent.values().sum::<usize>() <= 6 * PER_SECOND, "{sent:?}");
    let of_consumers = |sql: &String| {
        [".watch(", ".maintenance_look(", ".note_consumers("].iter().any(|of| sql.contains(of))
    };
    assert!(sent.keys().all(of_consumers), "{sent:?}");
    assert_eq!(proxy.connections(), opened, "no connection is opened");

    // And they are there at once when something comes.
    for stream in &streams {
        stream.producer().send(&2).await.unwrap();
    }
    for consumer in &mut consumers {
        consumer.handles(2, Duration::from_secs(20)).await;
    }
    for consumer in consumers {
        consumer.stop().await;
    }
}

/// One consumer gets the message. The others may look once, and no more than that.
#[tokio::test(flavor = "multi_thread")]
async fn tb_127_a_message_does_not_set_all_idle_consumers_upon_the_database() {
    const CONSUMERS: usize = 10;
    const MESSAGES: u64 = 20;
    let url = database().await;
    let proxy = Proxy::start(&url).await;
    let elsewhere = Client::connect(&url).await.unwrap();
    let stream = elsewhere.stream::<u64>("orders").create().await.unwrap();
    let group = stream.group("g").create().await.unwrap();
    let mut consumers = Vec::new();
    for _ in 0..CONSUMERS {
        let client = Client::connect(&proxy.url).await.unwrap();
        let stream = client.stream::<u64>("orders").open().await.unwrap();
        consumers.push(Running::start(&stream.group("g").open().await.unwrap()));
    }
    until("all listen", Duration::from_secs(30), async || {
        consumers.iter().all(|c| c.health.snapshot().listening)
    })
    .await;
    until("they are quiet", Duration::from_secs(60), async || {
        let count = proxy.count();
        tokio::time::sleep(Duration::from_secs(2)).await;
        count.load(Ordering::SeqCst) <= 2 * CONSUMERS * PER_SECOND
    })
    .await;

    let sent = Arc::new(Mutex::new(BTreeMap::<&str, usize>::new()));
    let log = sent.clone();
    proxy.set(move |statement| {
        let known = ["watch", "advance", "fetch", "extend", "release"];
        let mut words = statement.sql.split(|c: char| !c.is_alphanumeric() && c != '_');
        let word = words.find_map(|word| known.into_iter().find(|known| *known == word));
        *log.lock().unwrap().entry(word.unwrap_or("other")).or_default() += 1;
        None
    });
    // On a busy machine the one that claims may take so long that others try, too. Not always.
    let (producer, mut rounds) = (stream.producer(), 0);
    loop {
        sent.lock().unwrap().clear();
        for n in 0..MESSAGES {
            producer.send(&(rounds * MESSAGES + n)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        rounds += 1;
        until("all are handled", Duration::from_secs(30), async || {
            group.status().await.unwrap().resolved == (rounds * MESSAGES) as i64
        })
        .await;
        let sent = sent.lock().unwrap().clone();
        println!("{MESSAGES} messages to {CONSUMERS} consumers: {sent:?}");
        let each = |what: &str| sent.get(what).copied().unwrap_or_default();
        let messages = MESSAGES as usize;
        assert!(each("watch") <= 3 * CONSUMERS * messages, "{sent:?}");
        if each("advance") <= 4 * messages {
            break;
        }
        assert!(rounds < 5, "too many try to claim: {sent:?}");
    }

    let mut handled = Vec::new();
    for mut consumer in consumers {
        while let Ok(payload) = consumer.handled.try_recv() {
            handled.push(payload);
        }
        consumer.stop().await;
    }
    handled.sort_unstable();
    assert_eq!(handled, (0..rounds * MESSAGES).collect::<Vec<_>>());
}
