//! What has nothing to do with a stream does not delay it; what would go round the fence is refused.

use bytes::Bytes;
use futures_util::SinkExt;
use std::pin::pin;

use crate::plain::{create_group, installed};
use crate::support::{connect, count, database};

/// Rolled-back ids make the group look at the lock table; whoever else is busy is no reason to wait.
#[tokio::test]
async fn open_transactions_elsewhere_delay_nothing() {
    let (url, elsewhere) = (database().await, database().await);
    let plain = installed(&url).await;
    let unrelated = connect(&url).await;
    unrelated
        .batch_execute("CREATE TABLE etl (n int); BEGIN; INSERT INTO etl VALUES (1)")
        .await
        .unwrap();
    // A whole installation of the same names in another database, with a producer in the midst of it.
    let neighbour = installed(&elsewhere).await;
    neighbour.db.batch_execute("BEGIN").await.unwrap();
    neighbour.produce(1).await;
    // Another stream of the same installation.
    let second = connect(&url).await;
    second.batch_execute("SELECT sqlstreams.create_stream('second'); BEGIN; INSERT INTO sqlstreams.message_log_2 (payload) VALUES ('1')").await.unwrap();
    // Old snapshots, and locks on the log that no writer takes.
    let reader = connect(&url).await;
    reader
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM sqlstreams.message_log_1; LOCK TABLE sqlstreams.message_log_1 IN ROW SHARE MODE")
        .await
        .unwrap();

    for round in 0..5 {
        plain.burn(3).await;
        let produced = plain.produce(4).await;
        let lease = plain.claim(100).await;
        let lease = lease.unwrap_or_else(|| panic!("nothing was delivered in round {round}"));
        assert_eq!(plain.fetch(&lease).await, produced);
        assert!(plain.settle(&lease, "{[1,)}").await);
        plain.let_look().await;
    }
    for db in [&unrelated, &neighbour.db, &second, &reader] {
        assert!(!db.is_closed());
        db.batch_execute("COMMIT").await.unwrap();
    }
}

/// A consumer that produces to its own stream in the transaction in which it claims does not wait for itself.
#[tokio::test]
async fn a_claimer_does_not_wait_for_its_own_writes() {
    let plain = installed(&database().await).await;
    plain.burn(2).await;
    plain.db.batch_execute("BEGIN").await.unwrap();
    let produced = plain.produce(2).await;
    let lease = plain.claim(10).await.expect("its own transaction holds nothing back");
    assert_eq!(plain.fetch(&lease).await, produced);
    plain.db.batch_execute("COMMIT").await.unwrap();
}

/// A claim that is left open after it looked at a gap keeps the fence's row locked; other groups look for themselves.
#[tokio::test]
async fn a_claim_left_open_holds_up_no_other_group() {
    let url = database().await;
    let slow = installed(&url).await;
    let mut other = slow.again(&url).await;
    other.group = create_group(&other.db, 1, "other").await;
    slow.burn(2).await;
    slow.db.batch_execute("BEGIN").await.unwrap();
    assert!(slow.claim(10).await.is_none());
    let produced = other.produce(2).await;
    let lease = other.claim(10).await.expect("the other group has to pass the gap");
    assert_eq!(other.fetch(&lease).await, produced);
    slow.db.batch_execute("COMMIT").await.unwrap();
}

#[tokio::test]
async fn direct_writes_to_a_partition_are_refused_and_writes_through_the_parent_pass() {
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(3).await;
    let db = &plain.db;
    for role in ["origin", "replica"] {
        db.batch_execute(&format!("SET session_replication_role = {role}")).await.unwrap();
        for write in [
            "INSERT INTO sqlstreams.message_log_1_p0 (id, payload) OVERRIDING SYSTEM VALUE VALUES (100, '1')",
            "INSERT INTO sqlstreams.message_log_1_p0 (id, payload) OVERRIDING SYSTEM VALUE SELECT 1, '1' WHERE false",
            "UPDATE sqlstreams.message_log_1_p0 SET payload = '2'",
            "DELETE FROM sqlstreams.message_log_1_p0",
            "MERGE INTO sqlstreams.message_log_1_p0 AS t USING (SELECT 1) AS s ON t.id = 1 WHEN MATCHED THEN DELETE",
        ] {
            let error = db.batch_execute(write).await.expect_err(write);
            let error = error.as_db_error().expect(write);
            assert_eq!(error.code().code(), "SQ007", "{role}: {write}: {error}");
            assert!(error.hint().unwrap().contains("sqlstreams.message_log_1:"), "{error:?}");
        }
        assert_eq!(
            copy(&url, role, "sqlstreams.message_log_1_p0 (id, payload)", "77\t1\n").await,
            Some("SQ007".into())
        );

        db.batch_execute("INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('4')")
            .await
            .unwrap();
        assert_eq!(copy(&url, role, "sqlstreams.message_log_1 (payload)", "5\n6\n").await, None);
    }
    assert_eq!(count(db, "SELECT count(*) FROM sqlstreams.message_log_1").await, 9);
    let lease = plain.claim(100).await.unwrap();
    assert_eq!(plain.fetch(&lease).await.len(), 9);
}

/// The SQLSTATE with which a COPY is refused.
async fn copy(url: &str, role: &str, target: &str, rows: &'static str) -> Option<String> {
    // A connection of its own: the driver loses count of the messages when a COPY is refused.
    let db = connect(url).await;
    db.batch_execute(&format!("SET session_replication_role = {role}")).await.unwrap();
    let copied = async {
        let mut sink = pin!(db.copy_in(&format!("COPY {target} FROM STDIN")).await?);
        sink.send(Bytes::from_static(rows.as_bytes())).await?;
        sink.finish().await
    };
    let error: tokio_postgres::Error = copied.await.err()?;
    Some(error.code().map_or_else(|| error.to_string(), |code| code.code().to_owned()))
}
