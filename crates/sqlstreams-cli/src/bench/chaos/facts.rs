//! What was counted: the document that `--json` prints.

use serde::Serialize;

use super::count::Count;
use super::workers::Done;
use crate::bench::server::Server;

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Facts {
    pub(crate) sqlstreams: &'static str,
    pub(crate) postgresql: Server,
    /// Gives the same disturbances again, though never at quite the same moments.
    pub(crate) seed: u64,
    pub(crate) consumers: usize,
    /// How long they were disturbed.
    pub(crate) seconds: f64,
    /// Messages a second, if they were sent at a rate.
    pub(crate) rate: Option<u32>,
    pub(crate) keys: u32,
    /// Of a hundred messages, how many fail at first.
    pub(crate) failures: u8,
    pub(crate) lease_seconds: f64,
    /// Messages whose receipt came.
    pub(crate) produced: u64,
    /// Sends that failed.
    pub(crate) refused: u64,
    pub(crate) workers: Done,
    /// How long the groups took to their end, if they came there.
    pub(crate) drained_in_seconds: Option<f64>,
    pub(crate) plain: Count,
    pub(crate) ordered: Count,
    pub(crate) transactional: Count,
    /// Nothing lost, nothing altered, the ordered group in order, the transactional one exact, no worker failed.
    pub(crate) ok: bool,
}

impl Facts {
    /// What does not hold, in words.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        for count in self.counts() {
            let Count { group, lost, altered, repeated, .. } = count;
            if !count.is_complete() {
                complaints.push(format!("{group}: {lost} messages lost, {altered} altered"));
            } else if self.is_to_be_exact(count) && !count.is_exact() {
                complaints.push(format!("{group}: {repeated} messages done twice"));
            }
        }
        if self.ordered.out_of_order > 0 {
            let messages = self.ordered.out_of_order;
            complaints
                .push(format!("ordered: {messages} messages before earlier ones of their key"));
        }
        if self.drained_in_seconds.is_none() {
            complaints.push("the groups did not come to their end".to_owned());
        }
        if self.workers.failed > 0 {
            complaints.push(format!("{} workers failed", self.workers.failed));
        }
        complaints
    }

    pub(crate) fn counts(&self) -> impl Iterator<Item = &Count> {
        [&self.plain, &self.ordered, &self.transactional].into_iter()
    }

    /// Whether a group's business rows are one a message.
    pub(crate) fn is_to_be_exact(&self, count: &Count) -> bool {
        self.transactional.group == count.group
    }
}
