//! Idempotency keys that have outlived their stream's window are removed by whoever sends with keys, from time to time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio_postgres::types::ToSql;

use crate::client::{BOOKKEEPING, transact};
use crate::error::{Error, Result};
use crate::message::Encoded;
use crate::stream::StreamInner;

/// How often a process looks for such keys in a stream.
const EVERY: Duration = Duration::from_secs(10);
/// How often it looks without a lower bound: a transaction that was open for long may have left older ones.
const UNBOUNDED: Duration = Duration::from_secs(600);
/// So many go in one transaction.
const CHUNK: i64 = 10_000;

/// What a process remembers of a stream's keys.
#[derive(Debug, Default)]
pub(crate) struct Keys(Mutex<Upkeep>);

#[derive(Debug, Default)]
struct Upkeep {
    last: Option<Instant>,
    /// Below it all were removed, as of the last look without a lower bound.
    from: Option<SystemTime>,
    unbounded: Option<Instant>,
}

/// Messages were sent. Looks beside the work; failures are logged, the next look makes up for them.
pub(super) fn look_after(stream: &Arc<StreamInner>, messages: &[Encoded]) {
    if !messages.iter().any(Encoded::leaves_key) {
        return;
    }
    let Some(from) = stream.keys.due() else { return };
    let stream = stream.clone();
    let handle = stream.client.inner.background.handle().clone();
    handle.spawn(async move {
        if let Err(error) = expire(&stream, from).await {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(stream = stream.name, error, "could not remove old idempotency keys");
        }
    });
}

impl Keys {
    /// From where on to look, if it is time to.
    fn due(&self) -> Option<Option<SystemTime>> {
        let mut upkeep = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if upkeep.last.is_some_and(|last| now.duration_since(last) < EVERY) {
            return None;
        }
        upkeep.last = Some(now);
        if upkeep.unbounded.is_none_or(|last| now.duration_since(last) >= UNBOUNDED) {
            (upkeep.unbounded, upkeep.from) = (Some(now), None);
        }
        Some(upkeep.from)
    }

    fn removed(&self, upto: Option<SystemTime>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).from = upto;
    }
}

/// Removes what there is, in chunks of a transaction each, unless another process is at it.
async fn expire(stream: &StreamInner, mut from: Option<SystemTime>) -> Result<()> {
    let doing = "remove old idempotency keys";
    let client = &stream.client;
    let query = &client.inner.queries.expire_idempotency_keys;
    loop {
        let connection = client.connection(doing).await?;
        let params: [&(dyn ToSql + Sync); 3] = [&stream.id, &from, &CHUNK];
        let answer = transact(&connection, BOOKKEEPING, query, &params).await;
        let rows = client.keep(connection, answer.map_err(|e| Error::from_driver(e, doing)))?;
        let Some(row) = rows.first() else { return Ok(()) };
        let removed: i64 = row.get(0);
        if removed > 0 {
            from = row.get(1);
            stream.keys.removed(from);
        }
        if removed < CHUNK {
            return Ok(());
        }
    }
}
