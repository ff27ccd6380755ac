//! Installing: odd schema names, many at once, versions that do not fit, names that do not exist.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sqlstreams::{Client, Delivery, ErrorKind, RetryPolicy};

use crate::support::{connect, count, database, numbers};

#[tokio::test(flavor = "multi_thread")]
async fn any_name_will_do_for_a_schema() {
    let url = database().await;
    for name in ["we\"ird", "Schema é", "a.b; DROP TABLE x --", "'", "{schema}", "select", " "] {
        let client = Client::builder(&url).schema(name).connect().await.unwrap();
        let stream = numbers(&client, "it's \"odd\" %I {schema}", 500).await;
        let once = RetryPolicy::attempts(1);
        let group = stream.group("g'\"{stream}").retry(once).create().await.unwrap();
        let consumed = group
            .consumer()
            .until_caught_up()
            .run(async |m: Delivery<u64>| if m.payload == 7 { Err("no") } else { Ok(()) })
            .await;
        let consumed = consumed.unwrap_or_else(|e| panic!("schema {name:?}: {e:?}"));
        assert_eq!(consumed.handled, 499, "schema {name:?}");
        assert_eq!(group.redrive(None, 10).await.unwrap().len(), 1);
        assert_eq!(group.status().await.unwrap().dead, 0);
        let again = Client::builder(&url).schema(name).migrate(false).connect().await.unwrap();
        assert_eq!(again.streams().await.unwrap().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn twenty_may_install_at_once() {
    let url = database().await;
    let all = join_all((0..20).map(|_| {
        let url = url.clone();
        tokio::spawn(async move {
            let client = Client::builder(&url).pool_size(2).connect().await?;
            client
                .stream::<u64>("same")
                .create_if_missing()
                .await?
                .group("g")
                .create_if_missing()
                .await?;
            Ok::<_, sqlstreams::Error>(())
        })
    }));
    for installed in all.await {
        installed.unwrap().unwrap();
    }
    let db = connect(&url).await;
    for (table, rows) in
        [("schema_migration", 2), ("stream", 1), ("consumer_group", 1), ("stream_fence", 1)]
    {
        assert_eq!(
            count(&db, &format!("SELECT count(*) FROM sqlstreams.{table}")).await,
            rows,
            "{table}"
        );
    }
}

#[tokio::test]
async fn tb_112_another_version_is_refused_and_left_alone() {
    let url = database().await;
    Client::connect(&url).await.unwrap();
    let db = connect(&url).await;
    let version = count(&db, "SELECT max(version)::bigint FROM sqlstreams.schema_migration").await;
    let look = "SELECT md5(string_agg(oid::text || prosrc, ',' ORDER BY oid)) FROM pg_proc WHERE pronamespace = 'sqlstreams'::regnamespace";
    let before: String = db.query_one(look, &[]).await.unwrap().get(0);

    db.batch_execute(&format!("INSERT INTO sqlstreams.schema_migration (version, oldest, name, checksum, functions) VALUES ({0}, {0}, 'x', 'x', 'x')", version + 1)).await.unwrap();
    for migrate in [true, false] {
        let error = Client::builder(&url).migrate(migrate).connect().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::SchemaMismatch, "{error:?}");
        assert!(error.to_string().contains(&format!("version {}", version + 1)), "{error}");
        assert!(error.hint().unwrap().contains("Upgrade this program"), "{error:?}");
    }
    assert_eq!(
        db.query_one(look, &[]).await.unwrap().get::<_, String>(0),
        before,
        "functions were touched"
    );

    // Newer, and made so that this program can go on beside those that brought it: used as it is.
    db.batch_execute(&format!(
        "UPDATE sqlstreams.schema_migration SET oldest = {version} WHERE version > {version}"
    ))
    .await
    .unwrap();
    for migrate in [true, false] {
        let client = Client::builder(&url).migrate(migrate).connect().await.unwrap();
        let report = client.migrate().await.unwrap();
        assert_eq!((report.from, report.to), (Some(version as i32 + 1), version as i32 + 1));
        assert!(!report.changed);
        let stream = numbers(&client, &format!("s {migrate}"), 3).await;
        assert_eq!(stream.group("g").create().await.unwrap().status().await.unwrap().lag, 3);
    }
    assert_eq!(
        count(&db, "SELECT max(version)::bigint FROM sqlstreams.schema_migration").await,
        version + 1
    );

    // Older than this program: not used without being migrated.
    db.batch_execute("DELETE FROM sqlstreams.schema_migration; INSERT INTO sqlstreams.schema_migration (version, oldest, name, checksum, functions) VALUES (0, 0, 'x', 'x', 'x')").await.unwrap();
    let error = Client::builder(&url).migrate(false).connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SchemaMismatch, "{error:?}");
    assert!(error.hint().unwrap().contains("migrate"), "{error:?}");
}

#[tokio::test]
async fn what_is_not_there_is_named_with_what_is() {
    let url = database().await;
    let error = Client::builder(&url).migrate(false).connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SchemaMissing, "{error:?}");
    assert!(error.hint().unwrap().contains("migrate"), "{error:?}");

    let client = Client::connect(&url).await.unwrap();
    let error = client.stream::<u64>("ordres").open().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownStream);
    assert!(error.hint().unwrap().contains("none yet"), "{error:?}");
    let stream = client.stream::<u64>("orders").create().await.unwrap();
    let error = client.stream::<u64>("ordres").open().await.unwrap_err();
    assert!(
        error.to_string().contains("ordres") && error.hint().unwrap().contains("orders"),
        "{error:?}"
    );

    let error = stream.group("recipts").open().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownGroup);
    let group = stream.group("receipts").create().await.unwrap();
    let error = stream.group("recipts").open().await.unwrap_err();
    assert!(
        error.to_string().contains("recipts") && error.hint().unwrap().contains("receipts"),
        "{error:?}"
    );
    assert_eq!(stream.group("receipts").create().await.unwrap_err().kind(), ErrorKind::GroupExists);
    assert_eq!(
        client.stream::<u64>("orders").create().await.unwrap_err().kind(),
        ErrorKind::StreamExists
    );

    // By number, in plain SQL: what was dropped while somebody used it.
    let db = connect(&url).await;
    group.clone().drop_group().await.unwrap();
    let gone = format!(
        "advance(1, {}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 1)",
        group.id()
    );
    for (call, state) in [
        (gone.as_str(), "SQ002"),
        ("poll(1, 99)", "SQ002"),
        ("poll(99, 1)", "SQ001"),
        ("is_resolved(99, 1, 1)", "SQ001"),
        ("\"fetch\"(99, 1, gen_random_uuid(), 0, 1, 1, NULL::json)", "SQ001"),
        ("position_at(99, now())", "SQ001"),
        ("stream_head(99)", "SQ001"),
        ("create_stream('orders')", "SQ005"),
        ("create_stream('')", "SQ004"),
        ("create_stream('x', 'xml')", "SQ004"),
        ("create_group(1, 'g', 5)", "SQ004"),
        ("create_group(99, 'g')", "SQ001"),
        ("redrive(1, 99)", "SQ002"),
        ("seek(99, 1, 'latest')", "SQ001"),
        ("replay(1, 99)", "SQ002"),
        ("list_replays(1, 99)", "SQ002"),
        ("cancel_replay(99, 1)", "SQ001"),
    ] {
        let error = db.batch_execute(&format!("SELECT sqlstreams.{call}")).await.expect_err(call);
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), state, "{call}: {error}");
        assert!(error.hint().is_some(), "{call}: no hint in {error:?}");
    }
}

/// Whoever has read a view and keeps the transaction open holds a migration up only where it changes that view, and not for long.
#[tokio::test]
async fn readers_of_a_view_do_not_stop_a_migration() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let (db, reader) = (connect(&url).await, connect(&url).await);
    let older = "UPDATE sqlstreams.schema_migration SET functions = 'older'";
    db.batch_execute(older).await.unwrap();
    let read = "BEGIN; SELECT FROM sqlstreams.dead_letter; SELECT FROM sqlstreams.exception_queue; SELECT FROM sqlstreams.consumer_lease; SELECT FROM sqlstreams.consumer_group_cursor";
    reader.batch_execute(read).await.unwrap();
    let start = Instant::now();
    assert!(client.migrate().await.unwrap().changed);
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    reader.batch_execute("COMMIT").await.unwrap();

    db.batch_execute("CREATE OR REPLACE VIEW sqlstreams.consumer_lease AS SELECT * FROM sqlstreams.list_leases() LIMIT 1").await.unwrap();
    db.batch_execute(older).await.unwrap();
    reader.batch_execute(read).await.unwrap();
    let error = client.migrate().await.unwrap_err();
    assert!(error.to_string().contains("lock timeout") && error.is_retryable(), "{error:?}");
    assert!(error.hint().unwrap().contains("transaction open"), "{error:?}");
    reader.batch_execute("COMMIT").await.unwrap();
    assert!(client.migrate().await.unwrap().changed);
    let limited = "SELECT count(*) FROM pg_views WHERE schemaname = 'sqlstreams' AND definition LIKE '%LIMIT%'";
    assert_eq!(count(&db, limited).await, 0, "it is made anew");
}

/// A stream that is made while a migration runs has all its functions.
#[tokio::test]
async fn streams_are_made_before_a_migration_or_after_it() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    let (db, maker) = (connect(&url).await, connect(&url).await);
    let older = "UPDATE sqlstreams.schema_migration SET functions = 'older'";
    let made = "SELECT count(*) FROM pg_proc WHERE proname LIKE 'settle_message_%'";

    maker.batch_execute("BEGIN; SELECT sqlstreams.create_stream('a')").await.unwrap();
    db.batch_execute(older).await.unwrap();
    let migrating = tokio::spawn({
        let client = client.clone();
        async move { client.migrate().await }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!migrating.is_finished(), "it does not see the stream that is being made");
    // As the functions before this version would have left it.
    maker.batch_execute("SELECT sqlstreams.drop_stream_functions(1); COMMIT").await.unwrap();
    assert!(migrating.await.unwrap().unwrap().changed);
    assert_eq!(count(&db, made).await, 1);

    maker.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtextextended('sqlstreams migrate sqlstreams', 0))").await.unwrap();
    let making = tokio::spawn(async move { client.stream::<u64>("b").create().await.map(drop) });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!making.is_finished(), "the migration does not see it");
    maker.batch_execute("COMMIT").await.unwrap();
    making.await.unwrap().unwrap();
    assert_eq!(count(&db, made).await, 2);
}

#[tokio::test]
async fn functions_of_another_build_are_refused() {
    let url = database().await;
    Client::connect(&url).await.unwrap();
    Client::builder(&url).migrate(false).connect().await.unwrap();
    let db = connect(&url).await;
    db.batch_execute("UPDATE sqlstreams.schema_migration SET functions = 'other'").await.unwrap();
    let error = Client::builder(&url).migrate(false).connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SchemaMismatch, "{error:?}");
    assert!(error.hint().unwrap().contains("migrate"), "{error:?}");
}
