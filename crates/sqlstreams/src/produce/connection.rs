//! A pooled connection for a transaction of several steps.

use std::ops::Deref;
use std::time::Duration;

use crate::client::{Client, within};
use crate::error::Result;
use crate::pool::Pooled;

/// A connection that goes back to the pool only when it is [given back](Self::give_back). Dropped without that, because
/// it broke or because nobody waits any more, it is closed, and the server rolls back what was open on it.
#[derive(Debug)]
pub(super) struct Borrowed(Option<Pooled>);

impl Borrowed {
    pub(super) async fn take(client: &Client, doing: &str) -> Result<Self> {
        client.connection(doing).await.map(|pooled| Self(Some(pooled)))
    }

    /// No transaction is open, and nothing is under way.
    pub(super) fn give_back(mut self) {
        self.0.take();
    }

    /// Ends a transaction that failed. What does not answer is closed.
    pub(super) async fn roll_back(self) {
        let rolled_back = within(ROLLBACK_LIMIT, self.batch_execute("ROLLBACK"), "roll back").await;
        if let Ok(Ok(())) = rolled_back {
            self.give_back();
        }
    }
}

const ROLLBACK_LIMIT: Duration = Duration::from_secs(5);

impl Deref for Borrowed {
    type Target = tokio_postgres::Client;

    fn deref(&self) -> &Self::Target {
        match &self.0 {
            Some(pooled) => pooled,
            None => unreachable!("only give_back empties it, and consumes it"),
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Some(pooled) = self.0.take() {
            pooled.close();
        }
    }
}
