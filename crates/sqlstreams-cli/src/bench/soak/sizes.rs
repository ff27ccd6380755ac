//! How large the tables are.

use std::time::Instant;

use serde::Serialize;
use sqlstreams::Stream;

use crate::bench::place::{Place, Tables};

/// In bytes, with indexes and all.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Sizes {
    pub(crate) seconds: f64,
    pub(crate) log: i64,
    pub(crate) exceptions: i64,
    pub(crate) archive: i64,
    /// Cursors, leases and what the maintenance writes down.
    pub(crate) state: i64,
    /// What PostgreSQL writes down about tables that are made and dropped.
    pub(crate) catalog: i64,
}

impl Sizes {
    pub(crate) async fn look(
        place: &Place<i64>,
        schema: &str,
        stream: &Stream<i64>,
        begun: Instant,
    ) -> anyhow::Result<Self> {
        let sum = "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class AS c
                   JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND n.nspname = $1 AND c.relname ~ $2";
        let size = async |schema: &str, tables: &str| -> anyhow::Result<i64> {
            Ok(place.db.query_one(sum, &[&schema, &tables]).await?.get(0))
        };
        let id = stream.id();
        Ok(Self {
            seconds: begun.elapsed().as_secs_f64(),
            log: size(schema, &format!("^message_log_{id}_")).await?,
            exceptions: size(schema, &format!("^exception_queue_{id}$")).await?,
            archive: size(schema, &format!("^message_archive_{id}$")).await?,
            state: size(
                schema,
                &format!("^((consumer_group_cursor|consumer_lease|consumer_done)_{id}|log_partition|stream_pace|stream_fence|maintenance|maintenance_step|group_tally)$"),
            )
            .await?,
            catalog: size("pg_catalog", ".").await?,
        })
    }
}

/// How many partitions the log has up to its head.
pub(crate) async fn partitions(
    place: &Place<i64>,
    schema: &str,
    stream: &Stream<i64>,
) -> anyhow::Result<i64> {
    let partitions = Tables::in_schema(schema, "log_partition");
    let head = stream.info().await?.head;
    let sql = format!("SELECT count(*) FROM {partitions} WHERE stream_id = $1 AND from_id <= $2");
    Ok(place.db.query_one(&sql, &[&stream.id(), &head]).await?.get(0))
}
