//! A look behind the crate, in plain SQL: what the tables hold, and what the server wrote.

use std::collections::BTreeMap;

use anyhow::Context as _;
use sqlstreams::Dsn;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;

use super::facts::StateRows;

/// A connection of the demo's own, and where the stream's tables are.
pub(crate) struct Tables {
    db: tokio_postgres::Client,
    schema: String,
    stream: i64,
}

/// What the log holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log {
    pub(crate) rows: i64,
    pub(crate) payload_bytes: i64,
}

impl Tables {
    pub(crate) async fn of_stream(url: &str, schema: &str, stream: i64) -> anyhow::Result<Self> {
        let schema = format!("\"{}\"", schema.replace('"', "\"\""));
        Ok(Self { db: Dsn::parse(url)?.connect().await?, schema, stream })
    }

    /// The connection, for transactions.
    pub(crate) fn connection(&mut self) -> &mut tokio_postgres::Client {
        &mut self.db
    }

    /// The rows that a group takes.
    pub(crate) async fn state_rows(&self, group: i64) -> anyhow::Result<StateRows> {
        let (schema, stream) = (&self.schema, self.stream);
        let row = self
            .one(
                &format!(
                    "SELECT (SELECT count(*) FROM {schema}.consumer_group_cursor_{stream} WHERE group_id = $1),
                            (SELECT count(*) FROM {schema}.consumer_lease_{stream} WHERE group_id = $1),
                            (SELECT count(*) FROM {schema}.exception_queue_{stream} WHERE group_id = $1)"
                ),
                &[&group],
            )
            .await?;
        Ok(StateRows { cursor: row.get(0), leases: row.get(1), exceptions: row.get(2) })
    }

    /// How much the log holds.
    pub(crate) async fn log(&self) -> anyhow::Result<Log> {
        let sql = format!(
            "SELECT count(*), coalesce(sum(octet_length(payload::text)), 0)::bigint FROM {}.message_log_{}",
            self.schema, self.stream
        );
        let row = self.one(&sql, &[]).await?;
        Ok(Log { rows: row.get(0), payload_bytes: row.get(1) })
    }

    /// The cents of all orders, by currency.
    pub(crate) async fn revenue(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let sql = format!(
            "SELECT payload->>'currency', sum((payload->>'total')::bigint)::bigint FROM {}.message_log_{} GROUP BY 1",
            self.schema, self.stream
        );
        let rows = self.db.query(&sql, &[]).await.context("could not add the orders up")?;
        Ok(rows
            .iter()
            .map(|row| (row.get(0), u64::try_from(row.get::<_, i64>(1)).unwrap_or_default()))
            .collect())
    }

    /// The server's position in its write-ahead log, in bytes.
    pub(crate) async fn wal_position(&self) -> anyhow::Result<u64> {
        let sql = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint";
        Ok(u64::try_from(self.one(sql, &[]).await?.get::<_, i64>(0))?)
    }

    /// A setting of the server.
    pub(crate) async fn setting(&self, name: &str) -> anyhow::Result<String> {
        Ok(self.one("SELECT current_setting($1)", &[&name]).await?.get(0))
    }

    async fn one(&self, sql: &str, params: &[&(dyn ToSql + Sync)]) -> anyhow::Result<Row> {
        self.db.query_one(sql, params).await.context("could not look at the tables")
    }
}
