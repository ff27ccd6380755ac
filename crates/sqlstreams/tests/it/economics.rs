//! What a clean message costs: no row, and less than a byte of WAL.
//!
//! `SQLSTREAMS_ECONOMICS_MESSAGES` sets how many messages are consumed (200,000); scripts/long-tests runs a million.

use std::env;

use sqlstreams_dev::Cluster;

use crate::plain::{create_group, installed};
use crate::support::count;

const BATCH: i64 = 1_000;

#[tokio::test(flavor = "multi_thread")]
async fn clean_messages_cost_one_cursor_row_and_less_than_a_byte_of_wal_each() {
    let messages =
        env::var("SQLSTREAMS_ECONOMICS_MESSAGES").map_or(200_000, |n| n.parse().unwrap());
    // A cluster of its own: WAL is counted for the whole of it.
    let cluster =
        tokio::task::spawn_blocking(|| Cluster::builder().start().unwrap()).await.unwrap();
    let mut plain = installed(&cluster.url("postgres")).await;
    for made in (0..messages).step_by(50_000) {
        plain.produce((messages - made).min(50_000)).await;
        plain.db.batch_execute("SELECT sqlstreams.ensure_partitions(1)").await.unwrap();
    }

    for attempt in 0.. {
        let (wal, redo) = position(&plain.db).await;
        let (mut held, mut got) = (None, 0);
        while got < messages || held.is_some() {
            // As the crate does it.
            plain.db.batch_execute("BEGIN; SET LOCAL synchronous_commit = off").await.unwrap();
            let done: Vec<_> = held.iter().map(|lease| (lease, "{[1,)}")).collect();
            let (lost, lease) = plain.advance(&done, BATCH).await;
            plain.db.batch_execute("COMMIT").await.unwrap();
            assert!(lost.is_empty());
            held = lease;
            if let Some(lease) = &held {
                got += plain.fetch(lease).await.len() as i64;
            }
        }
        let (wal_after, redo_after) = position(&plain.db).await;
        assert_eq!(got, messages);
        let rows =
            [("consumer_group_cursor_1", 1), ("consumer_lease_1", 0), ("exception_queue_1", 0)];
        for (table, expected) in rows {
            let sql =
                format!("SELECT count(*) FROM sqlstreams.{table} WHERE group_id = {}", plain.group);
            assert_eq!(count(&plain.db, &sql).await, expected, "{table}");
        }
        if redo != redo_after && attempt < 3 {
            // A checkpoint in between: the next write to each page writes all of it. Read again as another group.
            plain.group = create_group(&plain.db, plain.stream, &format!("again {attempt}")).await;
            continue;
        }
        let bytes = (wal_after - wal) as f64 / messages as f64;
        println!("{messages} messages, {bytes:.3} bytes of WAL each");
        assert!(bytes <= 1.0, "{bytes} bytes of WAL per message");
        break;
    }
}

/// Where the WAL ends, and where the last checkpoint began.
async fn position(db: &tokio_postgres::Client) -> (i64, String) {
    let row = db
        .query_one(
            "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint, redo_lsn::text FROM pg_control_checkpoint()",
            &[],
        )
        .await
        .unwrap();
    (row.get(0), row.get(1))
}
