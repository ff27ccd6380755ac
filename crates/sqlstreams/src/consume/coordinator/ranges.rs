//! Ranges of the log: claiming them, telling what became of them, fetching their messages.

use std::time::Instant;

use uuid::Uuid;

use super::Coordinator;
use crate::consume::delivery::History;
use crate::consume::fairness::ALL;
use crate::consume::protocol::Page;
use crate::consume::straight::Window;
use crate::consume::workers::Job;
use crate::error::{ErrorKind, Result};
use crate::partitions;

impl Coordinator {
    /// Tells what there is to tell, and claims for so many messages of these lanes.
    pub(super) async fn advance(&mut self, limit: usize, lanes: i64) -> Result<()> {
        let reports = self.holding.lock().news(self.limited);
        let token = Uuid::new_v4();
        let (sent, bytes) = (Instant::now(), self.pace.fetch_bytes());
        let width = match self.fairness.is_fair() {
            true => self.sieve.most(),
            false => self.sieve.width(limit, self.limited),
        };
        let wish = self.fairness.wish(lanes);
        let partition_size = self.protocol.stream.partition_size;
        let window = match self.is_plain() && limit > 0 {
            true => self.straight.window(limit, self.pace.fitting(), partition_size),
            false => None,
        };
        let wanted = (limit as i64, width as i64);
        let call = self.protocol.advance(&reports, token, wanted, bytes, &wish, window);
        let advanced = self.unless_orphaned(token, call.await, limit > 0)?;
        self.exceptions_next = true;
        self.limited = advanced.limited;
        self.watch.set_paused(advanced.paused);
        self.not_before = advanced.wait.map_or(self.not_before, |wait| sent + wait);
        let lost = self.holding.lock().reported(&reports, &advanced.lost);
        self.give_up(lost);
        self.told();
        if limit > 0 {
            self.sieve.looked_at(advanced.looked_at, sent.elapsed());
            self.fairness.answered(advanced.unread);
        }
        match advanced.claimed {
            Some(claimed) => {
                let (first, last) = (claimed.pending.first(), claimed.pending.last());
                let asked = if self.sieve.is_bound() { width } else { limit };
                // Producers of other kinds may not look after partitions.
                if let Some(last) = last {
                    partitions::look_after(&self.protocol.stream, last);
                    self.straight.claimed(last);
                }
                if let Some(straight) = advanced.straight {
                    self.straight.tried(straight);
                }
                // Short of what was asked for: that may have been all. The watcher looks again soon, which locks nothing.
                let ids = last.zip(first).map_or(0, |(last, first)| (last - first + 1) as usize);
                let ids = advanced.looked_at.unwrap_or(ids);
                let short = match advanced.unread {
                    Some(unread) => unread == 0,
                    None => ids < asked,
                };
                if short && self.limited {
                    // Who knows what the limit left.
                    self.fairness.news();
                }
                if short && !self.limited {
                    self.seen.fresh = false;
                }
                self.watch.claimed(last, short);
                self.holding.lock().claimed(claimed, sent);
                self.holding.grown();
                if advanced.straight != Some(false) {
                    self.sift(advanced.lanes, first, ids, &advanced.page);
                }
                self.fetched(token, limit, advanced.page)?;
            }
            // None of these was for the group: on to the next.
            None if advanced.looked_at.is_some_and(|ids| ids > 0) => {
                let ids = advanced.looked_at.unwrap_or(0);
                self.sieve.found(0, ids);
                self.fairness.found(advanced.lanes.unwrap_or(ALL), ids, std::iter::empty());
                self.watch.claimed(None, ids < width);
            }
            // What there is is of lanes of which enough is held.
            None if limit > 0
                && advanced.wait.is_none()
                && self.fairness.is_fair()
                && lanes != ALL =>
            {
                self.fairness.exhausted(lanes);
                self.seen.lapsed = false;
            }
            None if limit > 0 && advanced.wait.is_none() => {
                self.watch.claimed_nothing();
                (self.seen.fresh, self.seen.lapsed) = (false, false);
            }
            None => {}
        }
        Ok(())
    }

    /// Whether all messages of the log are for the group, in no other order than that of their ids.
    fn is_plain(&self) -> bool {
        !self.sieve.is_bound() && !self.fairness.is_fair()
    }

    /// Learns from the first messages of a lease how many of its ids are for the group.
    fn sift(&mut self, lanes: Option<i64>, first: Option<i64>, ids: usize, page: &Result<Page>) {
        let Ok(page) = page else { return };
        // Those beyond the last message were not looked at.
        let seen = match (page.messages.last(), first) {
            (Some(last), Some(first)) if page.more => (last.id - first + 1) as usize,
            _ => ids,
        };
        self.sieve.found(page.messages.len(), seen);
        self.fairness.found(lanes.unwrap_or(ALL), seen, lanes_of(page));
    }

    /// A claim that may have been made without our learning of it is handed back as soon as that can be said.
    pub(super) fn unless_orphaned<R>(
        &mut self,
        token: Uuid,
        answer: Result<R>,
        claiming: bool,
    ) -> Result<R> {
        if claiming && answer.as_ref().is_err_and(|e| e.kind() == ErrorKind::Connection) {
            self.orphans.push(token);
        }
        answer
    }

    /// Fetches messages of a lease.
    pub(super) async fn fetch(&mut self, token: Uuid, after: i64, limit: usize) -> Result<()> {
        let bytes = self.pace.fetch_bytes();
        let straight = self.is_plain() && limit > 1 && self.straight.works();
        let last = if straight { self.holding.lock().last_id(token) } else { None };
        let window = last.map(|last| Window {
            ids: after + 1..last.saturating_add(1),
            messages: limit.min(self.pace.fitting()) as i64,
        });
        match self.protocol.fetch(token, after, limit as i64, bytes, window).await {
            Err(error) if limit == 1 && error.may_be_a_message() => {
                let id = self.protocol.next_id(token, after).await?;
                let fetched = self.holding.lock().fetched(token, id, id.is_some());
                if let (Some(id), Some((source, _))) = (id, fetched) {
                    self.bury(source, id, &error);
                }
                Ok(())
            }
            page => {
                if let Ok(page) = &page
                    && page.more
                    && let Some(last) = page.messages.last()
                {
                    let (ids, lanes) =
                        ((last.id - after) as usize, self.holding.lock().lanes(token));
                    self.sieve.found(page.messages.len(), ids);
                    self.fairness.found(lanes, ids, lanes_of(page));
                }
                self.fetched(token, limit, page)
            }
        }
    }

    /// Takes in what a fetch for a lease brought. Where one message keeps all from being read, they are read one by one.
    pub(super) fn fetched(&mut self, token: Uuid, limit: usize, page: Result<Page>) -> Result<()> {
        match page {
            Ok(page) => {
                let ids = page.messages.iter().map(|m| m.id);
                let fetched = self.holding.lock().fetched(token, ids, page.more);
                if let Some((source, term)) = fetched {
                    self.received(page.messages.into_iter().map(|message| Job {
                        source,
                        message,
                        history: History::default(),
                        term: term.clone(),
                    }));
                }
                Ok(())
            }
            Err(error) if limit > 1 && error.may_be_a_message() => {
                self.holding.lock().fetch_one_by_one(token);
                Ok(())
            }
            // The claim stands: what it holds is fetched by itself, after a pause.
            Err(error) => Err(error),
        }
    }
}

fn lanes_of(page: &Page) -> impl Iterator<Item = i16> {
    page.messages.iter().filter_map(|message| message.lane)
}
