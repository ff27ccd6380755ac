//! What every peer can do.

use std::sync::Arc;

use anyhow::Result;
use async_trait::async_trait;

use crate::messages::{Messages, Seen};

/// How many tasks send one message at a time.
pub(crate) const SENDERS: u64 = 64;

/// A messaging system with its client, ready to be measured.
///
/// A call returns when its work is as durable as the peer's settings make it: produced messages are stored, consumed ones
/// acknowledged.
#[async_trait]
pub(crate) trait Peer: Send + Sync {
    /// What was chosen for it, and in whose favour: printed with the figures.
    fn settings(&self) -> Vec<String>;

    /// The processes of its server and, if not this one, of its client. Those they start count with them.
    fn processes(&self) -> Processes;

    /// Makes a queue that is new and empty.
    async fn fresh(&mut self) -> Result<()>;

    /// Lets go of what [`fresh`](Self::fresh) made, so that the peer is still while another is measured.
    async fn rest(&mut self) -> Result<()>;

    /// Stores the messages by the best bulk path.
    async fn produce(&self, messages: Messages) -> Result<()>;

    /// Stores them one at a time, from [`SENDERS`] tasks at once.
    async fn send(&self, messages: Messages) -> Result<()>;

    /// Receives and acknowledges by the best bulk path, until all have been seen. They may still be on their way.
    async fn consume(&self, seen: Arc<Seen>) -> Result<()>;

    /// Stops what was started for it.
    async fn close(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Whose CPU time counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Processes {
    pub(crate) server: Vec<u32>,
    pub(crate) client: Vec<u32>,
    /// The PostgreSQL that it runs on, for the WAL: where to ask.
    pub(crate) postgres: Option<String>,
}
