//! Repairs: of one stream beside another, by several at once, and late.

use std::time::Duration;

use sqlstreams::Client;

use crate::doctor::{codes, finding};
use crate::support::{client, client_at, connect, count, database, numbers};

/// What is wrong with one stream does not keep the doctor from the others.
#[tokio::test]
async fn each_stream_is_looked_at_by_itself() {
    let (client, db) = client().await;
    for name in ["a", "b", "c"] {
        numbers(&client, name, 5).await;
    }
    db.batch_execute(
        "ALTER TABLE sqlstreams.message_log_1 ALTER id DROP IDENTITY; DROP TABLE sqlstreams.consumer_done_2; SELECT setval('sqlstreams.message_log_3_id_seq', 1); UPDATE sqlstreams.installation SET timeline = 9",
    )
    .await
    .unwrap();
    let doctor = client.doctor();
    let found = doctor.look().await.unwrap();
    let found: Vec<_> =
        found.iter().map(|f| (f.stream.as_deref().unwrap_or("-"), f.code.as_str())).collect();
    assert_eq!(
        found,
        [
            ("-", "restored"),
            ("a", "identity_missing"),
            ("b", "tables_missing"),
            ("c", "sequence_behind")
        ]
    );
    // What nobody has thought of.
    db.batch_execute(
        "ALTER TABLE sqlstreams.message_idempotency_3 RENAME COLUMN sent_at TO was_sent_at",
    )
    .await
    .unwrap();
    let found = doctor.look_at(Some("c")).await.unwrap();
    let failed = found.iter().find(|f| f.code == "not_looked_at").unwrap();
    assert!(
        failed.stream.as_deref() == Some("c") && failed.message.contains("sent_at"),
        "{failed:?}"
    );
    db.batch_execute(
        "ALTER TABLE sqlstreams.message_idempotency_3 RENAME COLUMN was_sent_at TO sent_at",
    )
    .await
    .unwrap();
    for found in doctor.look().await.unwrap().iter().filter(|f| f.fixable) {
        doctor.repair(found).await.unwrap();
    }
    assert_eq!(codes(&doctor).await, ["tables_missing"]);
    // Of the installation itself a table is gone.
    db.batch_execute("DROP TABLE sqlstreams.stream_fence").await.unwrap();
    let found = finding(&doctor).await;
    assert_eq!((found.code.as_str(), found.stream.as_deref()), ("tables_missing", None));
    assert!(found.message.contains("stream_fence") && !found.fixable);
}

/// Two at once do once what there is to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn repairs_at_once_are_one() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = numbers(&client, "s", 20).await;
    stream.producer().send(&1).delay(Duration::from_secs(600)).await.unwrap();
    for breaks in [
        "UPDATE sqlstreams.installation SET timeline = timeline + 1",
        "DELETE FROM sqlstreams.stream_fence",
        "DROP TRIGGER refuse_direct_write ON sqlstreams.message_log_1_p0",
        "DROP FUNCTION sqlstreams.produce_1",
        "DROP FUNCTION sqlstreams.save_cursor",
        "ALTER TABLE sqlstreams.message_log_1 DETACH PARTITION sqlstreams.message_log_1_p0",
        "SELECT setval('sqlstreams.message_log_1_id_seq', 1)",
        "ALTER SEQUENCE sqlstreams.message_delayed_1_id_seq RESTART",
        "ALTER SEQUENCE sqlstreams.stream_id_seq RESTART",
        "ALTER TABLE sqlstreams.message_delayed_1 ALTER id DROP IDENTITY",
        "ALTER TABLE sqlstreams.consumer_group ALTER max_attempts SET DEFAULT 1",
        "ALTER SEQUENCE sqlstreams.consumer_owner NO CYCLE",
        "DELETE FROM sqlstreams.log_partition WHERE number = 1",
    ] {
        db.batch_execute(breaks).await.unwrap();
        let found = finding(&client.doctor()).await;
        let before = stream.info().await.unwrap().head;
        let mut repairs = Vec::new();
        for _ in 0..4 {
            let (url, found) = (url.clone(), found.clone());
            repairs.push(tokio::spawn(async move {
                let doctor = Client::builder(&url).doctor().await.unwrap();
                doctor.repair(&found).await
            }));
        }
        for repair in repairs {
            repair.await.unwrap().unwrap_or_else(|error| panic!("{breaks}: {error:?}"));
        }
        assert_eq!(codes(&client.doctor()).await, [""; 0], "{breaks}");
        if found.code == "restored" {
            assert_eq!(stream.info().await.unwrap().head, before + 1_000_000);
            let epochs = "SELECT count(*) FROM sqlstreams.installation";
            assert_eq!(count(&connect(&url).await, epochs).await, 2);
        }
    }
}

/// A sequence that is ahead is never put back: what it gave out may be gone from the table.
#[tokio::test]
async fn a_repair_that_comes_late_moves_no_sequence_back() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 1).await;
    let delay =
        async || stream.producer().send(&1).delay(Duration::from_secs(600)).await.unwrap().id;
    delay().await;
    db.batch_execute("ALTER SEQUENCE sqlstreams.message_delayed_1_id_seq RESTART").await.unwrap();
    let found = finding(&client.doctor()).await;
    client.doctor().repair(&found).await.unwrap();
    let last = delay().await;
    assert!(stream.cancel_delayed(last).await.unwrap());
    client.doctor().repair(&found).await.unwrap();
    assert_eq!(delay().await, last + 1);
}

#[tokio::test]
async fn a_group_without_its_cursor_can_be_dropped() {
    let (client, db) = client().await;
    let stream = numbers(&client, "s", 1).await;
    let group = stream.group("g").create().await.unwrap();
    db.batch_execute("DELETE FROM sqlstreams.consumer_group_cursor_1").await.unwrap();
    let error = group.status().await.unwrap_err();
    assert!(error.to_string().contains("has no cursor"), "{error:?}");
    let found = finding(&client.doctor()).await;
    assert!(found.code == "cursor_missing" && found.hint.contains("drop the group"), "{found:?}");
    group.drop_group().await.unwrap();
    assert_eq!(codes(&client.doctor()).await, [""; 0]);
    stream.group("g").create().await.unwrap();
}
