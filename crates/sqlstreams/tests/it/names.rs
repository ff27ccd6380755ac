//! Names of streams and groups, and keys: any text will do, up to its limit in bytes.

use std::time::Duration;

use sqlstreams::{Client, Delivery, ErrorKind, Outgoing, Start};

use crate::support::{client, count, database};

/// Sends to a stream of that name and consumes in a group of that name.
async fn round_trip(client: &Client, name: &str) {
    let stream = client.stream::<u64>(name).partition_size(1_000_000_000).create().await;
    let stream = stream.unwrap_or_else(|e| panic!("{name:?}: {e:?}"));
    let batch = [1, 2];
    let batch =
        batch.iter().map(|n| Outgoing::new(n).key(name).routing_key(name).idempotency_key(name));
    let sent = stream.producer().send_all(batch).await.unwrap();
    assert!(sent[1].is_duplicate(), "{name:?}");
    let group = stream.group(name).start(Start::Beginning).create().await.unwrap();
    let expected = name.to_owned();
    let consumer = group.consumer().until_caught_up();
    let consumed = consumer
        .run(move |message: Delivery<u64>| {
            assert_eq!(message.context.stream(), expected);
            assert_eq!(message.context.group(), expected);
            assert_eq!(message.key.as_deref(), Some(&*expected));
            assert_eq!(message.routing_key.as_deref(), Some(&*expected));
            async {}
        })
        .await
        .unwrap();
    assert_eq!(consumed.handled, 1, "{name:?}");
    // It is found by its name, and by no other.
    assert_eq!(client.stream::<u64>(name).open().await.unwrap().id(), stream.id());
    assert_eq!(stream.group(name).open().await.unwrap().status().await.unwrap().group, name);
    assert!(client.stream::<u64>(format!("{name} ")).open().await.is_err());
    stream.drop_stream().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_143_names_of_every_length_work() {
    let (client, db) = client().await;
    // A round trip for those around which something could be cut.
    for length in [1, 30, 47, 48, 58, 62, 63, 64, 65, 128, 200] {
        round_trip(&client, &"n".repeat(length)).await;
        if length % 4 == 0 {
            round_trip(&client, &"🦀".repeat(length / 4)).await;
        }
    }
    // Of every length, as bytes and as characters of four: groups, and keys of all kinds.
    let names = || {
        let long = (1..=50).map(|length| "🦀".repeat(length));
        (1..=200).map(|length| "n".repeat(length)).chain(long)
    };
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let batch = names()
        .map(|name| Outgoing::new(&1).key(&*name).routing_key(&*name).idempotency_key(&*name));
    stream.producer().send_all(batch).await.unwrap();
    for name in names() {
        let group = stream.group(&name).bind(&*name).create().await.unwrap();
        assert_eq!(stream.group(&name).open().await.unwrap().id(), group.id());
    }
    assert_eq!(stream.groups().await.unwrap().len(), 250);
    for name in [1, 63, 64, 199, 200].map(|length| "n".repeat(length)) {
        let expected = name.clone();
        let consumer = stream.group(&name).open().await.unwrap().consumer().until_caught_up();
        let consumed = consumer
            .run(move |m: Delivery<u64>| {
                assert_eq!(m.key.as_deref(), Some(&*expected));
                async {}
            })
            .await
            .unwrap();
        assert_eq!(consumed.handled, 1, "its own message");
    }
    stream.drop_stream().await.unwrap();
    // And streams; the tables of each are many, so they go at once.
    for name in names() {
        let stream = client.stream::<u64>(&name).create().await.unwrap();
        assert_eq!(client.stream::<u64>(&name).open().await.unwrap().id(), stream.id());
        assert_eq!(stream.producer().send(&1).await.unwrap().id, 1);
        stream.drop_stream().await.unwrap();
    }
    for name in ["n".repeat(201), "🦀".repeat(51), String::new()] {
        let error = client.stream::<u64>(&name).create().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidName, "{name:?}");
    }
    // Nothing of them is left, nor was anything named by them.
    let tables = "SELECT count(*) FROM pg_class WHERE relnamespace = 'sqlstreams'::regnamespace AND relname ~ '^(message|consumer|exception)_.*_\\d'";
    assert_eq!(count(&db, tables).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_145_lengths_are_counted_in_bytes() {
    let (client, _db) = client().await;
    round_trip(&client, &"é".repeat(63)).await;
    let stream = client.stream::<u64>("é".repeat(100)).create().await.unwrap();
    let error = client.stream::<u64>("é".repeat(101)).create().await.unwrap_err();
    assert!(error.to_string().contains("202 bytes"), "{error}");
    let error = stream.group("é".repeat(101)).create().await.unwrap_err();
    assert!(error.to_string().contains("202 bytes"), "{error}");
    let producer = stream.producer();
    for (most, what) in [(1024, "key"), (255, "routing key"), (1024, "idempotency key")] {
        for (count, fits) in [(most / 2, true), (most / 2 + 1, false)] {
            let text = "é".repeat(count);
            let message = producer.send(&1);
            let sent = match what {
                "key" => message.key(text),
                "routing key" => message.routing_key(text),
                _ => message.idempotency_key(text),
            };
            match sent.await {
                Ok(_) => assert!(fits, "{what} of {count}"),
                Err(error) => {
                    assert!(!fits, "{what} of {count}: {error:?}");
                    assert_eq!(error.kind(), ErrorKind::InvalidMessage);
                    assert!(error.to_string().contains(&format!("{} bytes", count * 2)), "{error}");
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_147_punctuation_works_everywhere() {
    let (client, _db) = client().await;
    let all: String = (' '..='~').filter(|c| !c.is_alphanumeric()).collect();
    round_trip(&client, &all).await;
    for name in [
        "'",
        "\"",
        "\\",
        "$$",
        "%I",
        "{stream}",
        "{schema}",
        ";",
        "--",
        "/*",
        ".",
        "..",
        "*",
        "#",
        " ",
        "\t",
        "\n",
        "a.b",
        "NULL",
        "select",
        "$1",
        ":x",
        "\u{feff}",
        "\u{202e}x",
        "\u{1}",
    ] {
        round_trip(&client, name).await;
    }
    // Each by itself, and where it could end something.
    let stream = client.stream::<u64>("s").create().await.unwrap();
    for mark in all.chars() {
        for name in [format!("{mark}"), format!("a{mark}b"), format!("{mark}{mark}")] {
            let group = stream.group(&name).create().await.unwrap();
            assert_eq!(stream.group(&name).open().await.unwrap().id(), group.id(), "{name:?}");
            stream.producer().send(&1).key(&*name).routing_key(&*name).await.unwrap();
            let other = client.stream::<u64>(&name).create_if_missing().await.unwrap();
            assert_eq!(other.name(), name);
        }
    }
    stream.drop_stream().await.unwrap();
    // Names that differ in nothing but case, blanks or normalization are different names.
    let mut ids = Vec::new();
    for name in ["a", "A", "a ", "é", "e\u{301}"] {
        ids.push(client.stream::<u64>(name).create().await.unwrap().id());
    }
    ids.dedup();
    assert_eq!(ids.len(), 5);
    // Of the schema, too, which is in the text of functions.
    for schema in ["$$", "a$$b", "$body$", "$x$body$$", "a'b\"c\\d", "%I {schema} ;--", "Ü🦀"] {
        let url = database().await;
        let client = Client::builder(&url).schema(schema).connect().await.unwrap();
        round_trip(&client, "$$").await;
        let stream = client.stream::<u64>("c").compacted(true).create().await.unwrap();
        stream.producer().send(&1).key("k").await.unwrap();
        assert_eq!(stream.latest("k").await.unwrap().unwrap().payload, 1);
        assert_eq!(stream.current(None, 9).await.unwrap().messages.len(), 1);
        let group = stream.group("g").create().await.unwrap();
        let consumed = group.consumer().until_caught_up();
        let consumed = consumed.run_transactional(async |_: Delivery<u64>, _tx| ()).await;
        assert_eq!(consumed.unwrap().handled, 1, "{schema:?}");
        stream.compact(Duration::ZERO, Duration::ZERO).await.unwrap();
        stream.reclaim().await.unwrap();
    }
    // The longest wait is for nothing here.
    tokio::time::timeout(Duration::from_secs(10), client.streams()).await.unwrap().unwrap();
}
