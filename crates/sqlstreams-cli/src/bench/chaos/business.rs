//! The business tables that handlers write to: what is in them was done, whoever died afterwards.

use anyhow::Context as _;
use tokio_postgres::types::ToSql;

use crate::bench::place::Tables;

/// Written in autocommit, a row for each time that a message was handled.
pub(crate) const HANDLED: &str = "handled";
/// Written in the handlers' transactions, which also say that the message is done.
pub(crate) const BOOKED: &str = "booked";

/// One row of either table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) message_id: i64,
    pub(crate) payload: i64,
    /// The handler failed afterwards, on purpose.
    pub(crate) failed: bool,
    /// When, in seconds by the database's clock.
    pub(crate) at: f64,
}

/// Makes both tables.
pub(crate) async fn create(db: &tokio_postgres::Client, tables: &Tables) -> anyhow::Result<()> {
    for table in [HANDLED, BOOKED] {
        // No constraint: what happens twice is to be counted. `seq` tells the order, as `at` may not.
        let sql = format!(
            "CREATE TABLE {} (
                 seq bigint GENERATED ALWAYS AS IDENTITY,
                 group_name text NOT NULL,
                 message_id bigint NOT NULL,
                 payload bigint NOT NULL,
                 worker text NOT NULL,
                 failed boolean NOT NULL,
                 at timestamptz NOT NULL DEFAULT clock_timestamp()
             )",
            tables.name(table)
        );
        db.batch_execute(&sql).await.context("could not create a table")?;
    }
    Ok(())
}

/// Writes rows to one of the tables, for one group and one process.
#[derive(Debug, Clone)]
pub(crate) struct Book {
    insert: String,
    group: &'static str,
    worker: String,
}

impl Book {
    pub(crate) fn new(tables: &Tables, table: &str, group: &'static str, worker: &str) -> Self {
        let insert = format!(
            "INSERT INTO {} (group_name, message_id, payload, worker, failed) VALUES ($1, $2, $3, $4, $5)",
            tables.name(table)
        );
        Self { insert, group, worker: worker.to_owned() }
    }

    /// A message was handled, or is about to fail: by itself or in the transaction that is open on the connection.
    pub(crate) async fn write(
        &self,
        db: &tokio_postgres::Client,
        message_id: i64,
        payload: i64,
        failed: bool,
    ) -> Result<(), tokio_postgres::Error> {
        let params: [&(dyn ToSql + Sync); 5] =
            [&self.group, &message_id, &payload, &self.worker, &failed];
        db.execute(&self.insert, &params).await.map(drop)
    }
}

/// The rows of a group in the order in which they were written.
pub(crate) async fn rows(
    db: &tokio_postgres::Client,
    tables: &Tables,
    table: &str,
    group: &str,
) -> anyhow::Result<Vec<Row>> {
    let sql = format!(
        "SELECT message_id, payload, failed, extract(epoch FROM at)::float8
         FROM {} WHERE group_name = $1 ORDER BY seq",
        tables.name(table)
    );
    let rows = db.query(&sql, &[&group]).await.context("could not read what was handled")?;
    Ok(rows
        .iter()
        .map(|row| Row {
            message_id: row.get(0),
            payload: row.get(1),
            failed: row.get(2),
            at: row.get(3),
        })
        .collect())
}
