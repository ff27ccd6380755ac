//! What the server can do at all: loops of plain statements over plain connections, each with what suits it best.

use std::pin::pin;
use std::time::Instant;

use anyhow::Context as _;
use futures_util::TryStreamExt as _;
use sqlstreams::{CancellationToken, Dsn};
use tokio::task::JoinSet;
use tokio_postgres::Client;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

use super::Moved;
use crate::bench::spread::Spread;

/// How rows get into a table.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Way {
    /// One statement, with the payloads as an array.
    Unnest,
    /// `COPY … FROM STDIN` in the binary format.
    Copy,
}

/// Inserts rows over `connections` at once, `batch` per transaction, until then, each payload encoded as any program has to.
pub(crate) async fn insert(
    url: &str,
    table: &str,
    way: Way,
    payload: &str,
    (connections, batch): (u16, usize),
    until: Instant,
) -> anyhow::Result<Moved> {
    let mut loops = JoinSet::new();
    for _ in 0..connections {
        let db = Dsn::parse(url)?.connect().await?;
        let (table, payload) = (table.to_owned(), payload.to_owned());
        loops.spawn(async move {
            let (mut rows, mut commits) = (0, Spread::new()?);
            while Instant::now() < until {
                let begun = Instant::now();
                match way {
                    Way::Unnest => insert_once(&db, &table, &payload, batch).await?,
                    Way::Copy => copy_once(&db, &table, &payload, batch).await?,
                }
                commits.record(begun.elapsed().as_nanos().cast_signed());
                rows += batch as u64;
            }
            anyhow::Ok((rows, commits))
        });
    }
    Moved::sum(loops).await.context("could not insert in a loop")
}

async fn insert_once(db: &Client, table: &str, payload: &str, batch: usize) -> anyhow::Result<()> {
    let payloads: Vec<Json> =
        (0..batch).map(|_| Json::encode(payload)).collect::<Result<_, _>>()?;
    let sql = format!("INSERT INTO {table} (payload) SELECT unnest($1::json[])");
    db.query_typed(&sql, &[(&payloads, Type::JSON_ARRAY)]).await?;
    Ok(())
}

async fn copy_once(db: &Client, table: &str, payload: &str, batch: usize) -> anyhow::Result<()> {
    let sink = db.copy_in(&format!("COPY {table} (payload) FROM STDIN (FORMAT binary)")).await?;
    let mut writer = pin!(BinaryCopyInWriter::new(sink, &[Type::JSON]));
    for _ in 0..batch {
        writer.as_mut().write(&[&Json::encode(payload)?]).await?;
    }
    writer.finish().await?;
    Ok(())
}

/// A payload as the server takes it.
#[derive(Debug)]
struct Json(Vec<u8>);

impl Json {
    fn encode(payload: &str) -> serde_json::Result<Self> {
        let mut encoded = Vec::with_capacity(payload.len() + 2);
        serde_json::to_writer(&mut encoded, payload)?;
        Ok(Self(encoded))
    }
}

impl ToSql for Json {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.extend_from_slice(&self.0);
        Ok(IsNull::No)
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::JSON
    }

    to_sql_checked!();
}

/// Reads the rows with ids from `first` to `last` by ranges of `width` ids, whole. Returns how many there were.
pub(crate) async fn read(
    url: &str,
    log: &str,
    (first, last): (i64, i64),
    width: i64,
) -> anyhow::Result<u64> {
    let db = Dsn::parse(url)?.connect().await?;
    let mut rows = 0;
    for from in (first..=last).step_by(usize::try_from(width)?) {
        rows += range(&db, log, from, last.min(from + width - 1)).await?;
    }
    Ok(rows)
}

async fn range(db: &Client, log: &str, first: i64, last: i64) -> anyhow::Result<u64> {
    let sql = format!(
        "SELECT id, key, routing_key, headers, produced_at, payload FROM {log}
         WHERE id >= $1 AND id <= $2 ORDER BY id"
    );
    let params = [(&first as _, Type::INT8), (&last as _, Type::INT8)];
    let found = db.query_typed_raw(&sql, params.map(|(param, kind): (&i64, Type)| (*param, kind)));
    let mut found = pin!(found.await.context("could not read the log")?);
    let mut rows = 0;
    while let Some(row) = found.try_next().await? {
        // Bytes that nobody looks at might not have been fetched from memory.
        let payload: Raw<'_> = row.get(5);
        rows += u64::from(!payload.0.is_empty());
    }
    Ok(rows)
}

/// A value as it came.
struct Raw<'a>(&'a [u8]);

impl<'a> tokio_postgres::types::FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

/// Moves a cursor over the log as the simplest consumer would: one transaction for at most `width` ids, which locks the cursor, reads what
/// follows it and writes it anew. Ends when told to, or with nothing left once `last` is given. Returns how many rows it read.
pub(crate) async fn claim(
    url: &str,
    log: &str,
    cursor: &str,
    width: i64,
    stop: &CancellationToken,
) -> anyhow::Result<u64> {
    let mut db = Dsn::parse(url)?.connect().await?;
    let mut rows = 0;
    while !stop.is_cancelled() {
        let tx = db.transaction().await?;
        let sql = format!("SELECT position FROM {cursor} FOR UPDATE");
        let position: i64 = tx.query_typed(&sql, &[]).await?.first().context("no cursor")?.get(0);
        let sql = format!(
            "SELECT id, key, routing_key, headers, produced_at, payload FROM {log}
             WHERE id > $1 ORDER BY id LIMIT $2"
        );
        let params = [(&position as _, Type::INT8), (&width as _, Type::INT8)];
        let found = tx.query_typed(&sql, &params).await?;
        let last: i64 = match found.last() {
            Some(row) => row.get(0),
            None => {
                tx.commit().await?;
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                continue;
            }
        };
        let sql = format!("UPDATE {cursor} SET position = $1");
        tx.query_typed(&sql, &[(&last as _, Type::INT8)]).await?;
        tx.commit().await?;
        rows += found.len() as u64;
    }
    Ok(rows)
}
