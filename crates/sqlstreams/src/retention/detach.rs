//! Taking a partition out of the log: `DETACH … CONCURRENTLY`, on a session of its own.
//!
//! It waits, without a lock, for every transaction that has the log open, which may take hours, and goes on beside all else meanwhile. Interrupted, by the
//! end of the process, a kill or a timeout, it leaves the partition pending, and `finalize_detach` finishes it. Only one can be pending at a time.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::timeout;
use tokio_postgres::Client as PgClient;
use tokio_postgres::error::SqlState;

use crate::client::{Client, SOON, answered, run};
use crate::error::{Error, Result};

/// No timeout of the role or the database interrupts it. The last one tells that the session is one of its own: behind a pooler it does not get through.
const SETTINGS: &str = "-c statement_timeout=0 -c lock_timeout=0 -c idle_in_transaction_session_timeout=0 -c sqlstreams.session=own";
/// How often it is looked whether it is in others' way.
const LOOK: Duration = Duration::from_millis(500);
/// How long a step waits for it.
const PATIENCE: Duration = Duration::from_secs(1);

/// What it ends with where another does the same, or something had to be given way to.
const LOOK_AGAIN: &[SqlState] = &[
    SqlState::QUERY_CANCELED,
    SqlState::LOCK_NOT_AVAILABLE,
    SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
    SqlState::UNDEFINED_TABLE,
];

/// The streams of which this client is detaching a partition.
#[derive(Debug, Default)]
pub(crate) struct Detaching(Mutex<BTreeSet<i64>>);

impl Detaching {
    pub(super) fn is_under_way(&self, stream: i64) -> bool {
        self.lock().contains(&stream)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<i64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends with the task, however that does.
struct UnderWay(Client, i64);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.inner.detaching.lock().remove(&self.1);
    }
}

/// Begins, and waits a moment for the end. What is left when it returns is to be looked up.
pub(super) async fn detach(client: &Client, stream: i64, parent: &str, leaf: &str) -> Result<()> {
    if !client.inner.detaching.lock().insert(stream) {
        return Ok(());
    }
    let under_way = UnderWay(client.clone(), stream);
    let sql = format!("ALTER TABLE {parent} DETACH PARTITION {leaf} CONCURRENTLY");
    let leaf = leaf.to_owned();
    let mut task = client.inner.background.handle().spawn(async move {
        let done = carry_out(&under_way.0, &sql, &leaf).await;
        drop(under_way);
        done
    });
    match timeout(PATIENCE, &mut task).await {
        Ok(Ok(done)) => done,
        // It panicked, or the client is gone.
        Ok(Err(_)) | Err(_) => Ok(()),
    }
}

async fn carry_out(client: &Client, sql: &str, leaf: &str) -> Result<()> {
    let doing = "take a partition out of the log";
    let connection = session(client).await?;
    let detach = connection.batch_execute(sql);
    tokio::pin!(detach);
    loop {
        if let Ok(done) = timeout(LOOK, &mut detach).await {
            return match done {
                // Interrupted, here or by somebody, or another was faster: it is pending, gone, or as it was.
                Err(error) if error.code().is_some_and(|code| LOOK_AGAIN.contains(code)) => Ok(()),
                done => done.map_err(|e| Error::from_driver(e, doing)),
            };
        }
        let stuck = client.ask(&client.inner.queries.detach_is_stuck, &[&leaf], doing).await;
        if stuck.is_ok_and(|rows| rows.first().is_some_and(|row| row.get(0))) {
            let token = connection.cancel_token();
            let cancelled = timeout(SOON, client.inner.connector.cancel(&token)).await;
            if let Ok(Err(error)) = cancelled {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "could not cancel a DETACH"
                );
            }
        }
    }
}

async fn session(client: &Client) -> Result<PgClient> {
    let connector = &client.inner.connector;
    let doing = "open a connection";
    let opened = match connector.connect_with(SETTINGS).await {
        // A pooler may not know what to do with settings.
        Err(_) => connector.connect().await,
        opened => opened,
    };
    let (connection, _) = opened.map_err(|e| Error::from_connect(e, &client.inner.target))?;
    answered(SOON, run(&connection, &client.inner.queries.detach_session, &[]), doing).await?;
    Ok(connection)
}
