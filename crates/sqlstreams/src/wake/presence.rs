//! Which groups a process consumes, told to the database now and then: groups may expire that nobody consumes (functions/group_expiry.sql),
//! and looking at one leaves no trace.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::watcher::Group;
use crate::client::Client;

/// Whoever consumes for a moment only says nothing, and others do not become known sooner.
const FIRST: Duration = Duration::from_secs(20);
/// How often it is told, while the groups are the same.
const AGAIN: Duration = Duration::from_secs(1800);

#[derive(Debug)]
pub(super) struct Presence {
    told: BTreeSet<i64>,
    next: Instant,
}

impl Presence {
    pub(super) fn new() -> Self {
        Self { told: BTreeSet::new(), next: Instant::now() + FIRST }
    }

    /// Tells in a task of its own, if it is time to. Nobody waits for it, and what is not heard is told again.
    pub(super) fn note(&mut self, client: &Client, watched: &[Arc<Group>]) {
        let now = Instant::now();
        let new = || watched.iter().any(|group| !self.told.contains(&group.group));
        if now < self.next || watched.is_empty() || (now < self.next + AGAIN && !new()) {
            return;
        }
        self.next = now + FIRST;
        self.told = watched.iter().map(|group| group.group).collect();
        let groups: Vec<i64> = self.told.iter().copied().collect();
        let client = client.clone();
        tokio::spawn(async move {
            let note = &client.inner.queries.note_consumers;
            if let Err(error) = client.ask(note, &[&groups], "say what is consumed").await {
                tracing::debug!(%error, "could not say which groups are consumed");
            }
        });
    }
}
