//! Of which leases the messages are read straight from the log (`claimed_range` and the statement that reads), in plain SQL.

use std::ops::Range;

use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::plain::{Plain, create_group, installed};
use crate::retention::{hour, scene};
use crate::support::{connect, count, database};

const NOTHING: [i64; 0] = [];

/// A lease of these ids, and what of it may be read straight, from an id on.
async fn range(plain: &Plain, token: Uuid, from: i64) -> Option<(i64, i64)> {
    let sql = "SELECT first, last FROM sqlstreams.claimed_range($1, $2, $3, $4)";
    let row = plain.db.query_one(sql, &[&plain.stream, &plain.group, &token, &from]).await.unwrap();
    row.get::<_, Option<i64>>(0).zip(row.get(1))
}

/// The ids that come straight from the log, as the crate reads it.
async fn read(plain: &Plain, token: Uuid, window: Range<i64>) -> Vec<i64> {
    let sql = include_str!("../../sql/queries/fetch_range.sql")
        .replace("{schema}", "sqlstreams")
        .replace("{stream}", &plain.stream.to_string());
    let limit = 100_000_i64;
    let params: [&(dyn ToSql + Sync); 5] =
        [&plain.group, &token, &window.start, &window.end, &limit];
    plain.db.query(&sql, &params).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// Of which leases all that the log has is theirs.
#[tokio::test]
async fn only_a_range_all_of_which_is_the_groups_is_read_straight() {
    let mut plain = installed(&database().await).await;
    plain.produce(100).await;
    let lease = plain.claim(20).await.unwrap();
    let token = lease.token;
    assert_eq!(range(&plain, token, 1).await, Some((1, 20)));
    assert_eq!(range(&plain, token, -5).await, Some((1, 20)));
    assert_eq!(range(&plain, token, 7).await, Some((7, 20)));
    assert_eq!(range(&plain, token, 21).await, None);
    assert_eq!(range(&plain, Uuid::new_v4(), 1).await, None);
    assert_eq!(read(&plain, token, 1..1_000).await, (1..=20).collect::<Vec<i64>>());
    assert_eq!(read(&plain, token, 5..11).await, (5..=10).collect::<Vec<i64>>());
    // A part in the middle is done: what was read before is left out, what comes after is one range.
    assert!(plain.settle(&lease, "{[1,3),[8,10)}").await);
    for (from, expected) in [(1, None), (7, None), (8, Some((10, 20))), (12, Some((12, 20)))] {
        assert_eq!(range(&plain, token, from).await, expected, "from {from}");
    }
    assert_eq!(read(&plain, token, 1..1_000).await, NOTHING);
    assert!(plain.settle(&lease, "{(,)}").await);
    assert_eq!(range(&plain, token, 1).await, None);
    // Another group's.
    let lease = plain.claim(20).await.unwrap();
    let other = create_group(&plain.db, plain.stream, "other").await;
    let group = std::mem::replace(&mut plain.group, other);
    assert_eq!(range(&plain, lease.token, 1).await, None);
    plain.group = group;
    // Somebody has taken it over.
    assert_eq!(range(&plain, lease.token, 1).await, Some((21, 40)));
    let expire = "UPDATE sqlstreams.consumer_lease_1 SET expires_at = '-infinity'";
    plain.db.batch_execute(expire).await.unwrap();
    let mine = plain.claim(5).await.unwrap();
    assert_eq!(mine.pending, "{[21,26)}");
    assert_eq!(range(&plain, lease.token, 1).await, None);
    assert_eq!(range(&plain, mine.token, 1).await, Some((21, 25)));
    assert!(plain.settle(&mine, "{(,)}").await);
    while let Some(lease) = plain.claim(100).await {
        assert!(plain.settle(&lease, "{(,)}").await);
    }
    // A replay's, which goes by the bindings of its time.
    plain.db.batch_execute("SELECT sqlstreams.replay(1, 1, 1, 10)").await.unwrap();
    let again = plain.claim(100).await.unwrap();
    assert_eq!(again.pending, "{[1,11)}");
    assert_eq!(range(&plain, again.token, 1).await, None);
    assert!(plain.settle(&again, "{(,)}").await);
    // One that is for some lanes.
    plain.produce(10).await;
    let lease = plain.claim(100).await.unwrap();
    assert!(range(&plain, lease.token, 1).await.is_some());
    let lanes = "UPDATE sqlstreams.consumer_lease_1 SET lanes = 1";
    plain.db.batch_execute(lanes).await.unwrap();
    assert_eq!(range(&plain, lease.token, 1).await, None);
    plain.db.batch_execute("UPDATE sqlstreams.consumer_lease_1 SET lanes = NULL").await.unwrap();
    // The group is bound from now on, and was not when it was claimed.
    assert!(range(&plain, lease.token, 1).await.is_some());
    plain.db.batch_execute("SELECT sqlstreams.bind(1, 1, 'a')").await.unwrap();
    assert_eq!(range(&plain, lease.token, 1).await, None);
    assert_eq!(plain.fetch(&lease).await.len(), 10);
}

/// What lies in partitions that have left is not in the log, or not all of it.
#[tokio::test]
async fn what_has_left_the_log_is_not_read_from_it() {
    let scene = scene(hour().drop_unread(true)).await;
    scene.fill(2_500).await;
    let group = create_group(&scene.db, 1, "g").await;
    let plain = Plain { db: connect(&scene.url).await, stream: 1, group };
    let lease = plain.claim(1_200).await.unwrap();
    let all: Vec<i64> = (1..=1_200).collect();
    assert_eq!(read(&plain, lease.token, 1..10_000).await, all);
    // Whoever reads has the partition: it is not emptied under their eyes.
    plain.db.batch_execute("BEGIN").await.unwrap();
    assert_eq!(read(&plain, lease.token, 1..10_000).await, all);
    scene.a_day_later().await;
    scene.db.batch_execute("SELECT sqlstreams.retire_partitions(1)").await.unwrap();
    let archive = "SELECT finished::int::bigint FROM sqlstreams.archive_referenced(1, 0, 10000)";
    assert_eq!(count(&scene.db, archive).await, 1);
    let empty = "SELECT sqlstreams.empty_leaf(1, 0)::int::bigint";
    assert_eq!(count(&scene.db, empty).await, 0);
    // Given up is as good as gone.
    assert_eq!(read(&plain, lease.token, 1..10_000).await, NOTHING);
    plain.db.batch_execute("COMMIT").await.unwrap();
    assert_eq!(count(&scene.db, empty).await, 1);
    assert_eq!(read(&plain, lease.token, 1..10_000).await, NOTHING);
    assert_eq!(plain.fetch(&lease).await, all);
    scene.let_go(2).await;
    assert_eq!(read(&plain, lease.token, 1..10_000).await, NOTHING);
    assert_eq!(plain.fetch(&lease).await, all);
    // What comes behind is there.
    assert_eq!(read(&plain, lease.token, 1_000..10_000).await, NOTHING);
    let next = plain.claim(100).await.unwrap();
    assert_eq!(read(&plain, next.token, 1_000..10_000).await.len(), 100);
}
