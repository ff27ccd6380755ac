//! Exceptions: claiming those that are due, fetching their messages, telling how they ended.

use std::collections::BTreeSet;
use std::time::Instant;

use uuid::Uuid;

use super::Coordinator;
use crate::consume::delivery::History;
use crate::consume::workers::Job;
use crate::error::Result;
use crate::outcome::Outcome;

/// The most exceptions claimed at once.
const MOST: usize = 500;

impl Coordinator {
    /// Fetches messages of claimed exceptions, if there are any to fetch.
    pub(super) async fn fetch_exceptions(&mut self) -> Result<bool> {
        let mut ids = self.holding.lock().unfetched_exceptions();
        if ids.is_empty() {
            self.exceptions_one_by_one = false;
            return Ok(false);
        }
        if self.exceptions_one_by_one {
            ids.truncate(1);
        }
        let page = match self.protocol.fetch_messages(&ids, self.pace.fetch_bytes()).await {
            Ok(page) => page,
            Err(error) if error.may_be_a_message() => {
                match ids.as_slice() {
                    &[id] => {
                        let retry = self.holding.lock().fetched_exception(id);
                        if let Some(retry) = retry {
                            self.bury(retry.source, id, &error);
                        }
                    }
                    _ => self.exceptions_one_by_one = true,
                }
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        // Up to here the page is complete: an id that is not on it has no message any more.
        let complete_to = match page.messages.last() {
            Some(last) if page.more => last.id,
            _ => i64::MAX,
        };
        let found: BTreeSet<i64> = page.messages.iter().map(|m| m.id).collect();
        for id in ids.into_iter().filter(|id| *id <= complete_to && !found.contains(id)) {
            let retry = self.holding.lock().fetched_exception(id);
            if let Some(retry) = retry {
                let gone = Outcome::Dead("the message is no longer in the log".to_owned());
                self.end(retry.source, id, gone.into());
            }
        }
        let mut jobs = Vec::with_capacity(page.messages.len());
        for mut message in page.messages {
            if let Some(retry) = self.holding.lock().fetched_exception(message.id) {
                let history = History {
                    attempts: u32::try_from(retry.attempts).unwrap_or(0),
                    delays: u32::try_from(retry.delays).unwrap_or(0),
                    first_failed_at: Some(retry.first_failed_at),
                };
                message.lane = retry.lane;
                jobs.push(Job { source: retry.source, message, history, term: retry.term });
            }
        }
        self.received(jobs.into_iter());
        Ok(true)
    }

    /// One suspect at a time in the whole process.
    pub(super) fn may_take_suspect(&mut self) -> bool {
        if self.suspect.is_some() {
            return false;
        }
        let suspects = &self.protocol.stream.client.inner.suspects;
        self.suspect = suspects.clone().try_acquire_owned().ok();
        self.suspect.is_some()
    }

    /// Claims exceptions that are due, of these lanes in a fair group.
    pub(super) async fn claim_exceptions(
        &mut self,
        limit: usize,
        suspect: bool,
        lanes: i64,
    ) -> Result<()> {
        let (token, limit) = (Uuid::new_v4(), limit.min(MOST));
        // Suspects are few, and may have waited for long.
        let due_from = if suspect { None } else { self.watch.due_from() };
        let sent = Instant::now();
        let claimed =
            self.protocol.take_exceptions(token, limit as i64, suspect, due_from, lanes).await;
        if suspect {
            // Unless one is held, which is seen to below.
            let permit = self.suspect.take();
            if claimed.as_ref().is_ok_and(|claimed| !claimed.exceptions.is_empty()) {
                self.suspect = permit;
            }
        }
        let claimed = self.unless_orphaned(token, claimed, true)?;
        self.exceptions_next = false;
        if suspect {
            // Where one was, more may be: the next is asked for as soon as this one has ended, not at the next look.
            self.seen.suspect = !claimed.exceptions.is_empty();
        } else {
            // A limit may have allowed some of many.
            let some = self.limited && !claimed.exceptions.is_empty();
            self.seen.due = claimed.exceptions.len() == limit || some;
            self.watch.claimed_exceptions(claimed.earliest_due);
        }
        if !claimed.exceptions.is_empty() {
            self.watch.claimed(None, !self.seen.due);
            self.holding.lock().claimed_exceptions(
                token,
                claimed.exceptions,
                suspect,
                claimed.lease_duration,
                sent,
            );
            self.holding.grown();
        }
        Ok(())
    }

    pub(super) async fn settle_exceptions(&mut self) -> Result<()> {
        let reports = self.holding.lock().settled().to_vec();
        let lost = self.protocol.settle_exceptions(&reports).await?;
        self.holding.lock().settled_reported(reports.len());
        self.told();
        if !lost.is_empty() {
            tracing::warn!(stream = self.protocol.stream.name, messages = ?lost, "leases were lost before these exceptions were settled; they will be tried again");
        }
        Ok(())
    }
}
