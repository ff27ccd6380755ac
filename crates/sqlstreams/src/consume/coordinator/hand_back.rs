//! Handing back: what lapsed, what slow handlers cannot do soon, and everything at the end.

use std::time::Instant;

use uuid::Uuid;

use super::{Coordinator, TROUBLE};
use crate::backoff::jittered;
use crate::consume::fairness::ALL;
use crate::consume::later;
use crate::consume::protocol::LeaseReport;
use crate::error::Result;

/// Where a group with bindings has a limit, a lease holds no more ids, all of them of its messages: see `keep_matching` in the
/// SQL. One that holds more was claimed before.
const MOST_COUNTED: usize = 64;

impl Coordinator {
    /// Hands back what will not be run here any more.
    pub(super) async fn hand_back_spent(&mut self) -> Result<bool> {
        let (spent, left) = {
            let held = self.holding.lock();
            (held.spent(), held.left_exceptions())
        };
        self.release(&spent).await?;
        self.release_exceptions(&left).await?;
        Ok(!spent.is_empty() || !left.is_empty())
    }

    /// Hands leases back.
    async fn release(&self, reports: &[LeaseReport]) -> Result<()> {
        if !reports.is_empty() {
            self.protocol.release(reports).await?;
            let tokens: Vec<Uuid> = reports.iter().map(|r| r.token).collect();
            self.holding.lock().reported(reports, &tokens);
        }
        Ok(())
    }

    /// Hands exceptions back, by token and id.
    async fn release_exceptions(&self, exceptions: &[(Uuid, i64)]) -> Result<()> {
        if !exceptions.is_empty() {
            self.protocol.release_exceptions(exceptions).await?;
            let ids: Vec<i64> = exceptions.iter().map(|(_, id)| *id).collect();
            self.holding.lock().lost_exceptions(&ids);
        }
        Ok(())
    }

    /// Handlers have become slow: others may have what would wait here for long.
    pub(super) async fn hand_back_surplus(&mut self) -> Result<bool> {
        let (held, unfetched) = {
            let held = self.holding.lock();
            let unfetched = if self.sieve.is_bound() { held.unfetched_ids() } else { Vec::new() };
            (held.messages(), unfetched)
        };
        let expected = |(lanes, ids): &(i64, usize)| match self.fairness.is_fair() {
            true => self.fairness.expected(*lanes, *ids),
            false => self.sieve.expected(*ids),
        };
        let expected: usize = unfetched.iter().map(expected).sum();
        let unfetched: usize = unfetched.iter().map(|(_, ids)| ids).sum();
        // More of a range turned out to be for the group than was expected, or the group has got a limit since: what was not
        // fetched is nobody's as yet.
        let unfetched = self.limited && unfetched > MOST_COUNTED
            || self.pace.surplus(held + expected) > self.pace.surplus(held);
        let surplus = self.pace.surplus(held);
        if surplus > 0 {
            let taken = self.queue.take_last(surplus);
            let mut held = self.holding.lock();
            for (source, id) in taken {
                held.leave(source, id);
            }
        }
        self.hand_back_parts(unfetched).await
    }

    /// Hands back what of our leases was taken from the queue again; with `unfetched`, what never came into it as well.
    async fn hand_back_parts(&mut self, unfetched: bool) -> Result<bool> {
        let parts = self.holding.lock().surplus(unfetched);
        for surplus in &parts {
            if self.protocol.release_part(surplus).await? {
                self.holding.lock().parted(surplus);
            } else {
                let lost = self.holding.lock().reported(&[], &[surplus.token]);
                self.give_up(lost);
            }
        }
        Ok(!parts.is_empty())
    }

    /// Hands back what does not run, while the rest does.
    async fn hand_back_idle(&mut self) -> Result<()> {
        let idle = self.holding.lock().left_exceptions();
        self.release_exceptions(&idle).await?;
        self.hand_back_parts(true).await.map(|_| ())
    }

    /// Hands back at once what does not run, lets running handlers finish, and hands back what is left then.
    pub(super) async fn stop(&mut self) -> Result<()> {
        let taken = self.queue.take_back(|_| false);
        {
            let mut held = self.holding.lock();
            for (source, id) in taken {
                held.leave(source, id);
            }
        }
        let deadline = later(Instant::now(), self.settings.shutdown_timeout);
        let abort = self.settings.abort.clone();
        self.absorb_all();
        tokio::select! {
            handed_back = self.hand_back_idle() => if let Err(error) = handed_back {
                tracing::warn!(
                    stream = self.protocol.stream.name,
                    error = &error as &dyn std::error::Error,
                    "could not hand back what does not run; that is done at the end"
                );
            },
            () = abort.cancelled() => {}
            () = tokio::time::sleep_until(deadline.into()) => {}
        }
        while self.queue.unfinished() > 0 && Instant::now() < deadline && !abort.is_cancelled() {
            self.show();
            tokio::select! {
                Some(finished) = self.results.recv() => self.unabsorbed.extend(finished),
                () = abort.cancelled() => {}
                () = tokio::time::sleep_until(deadline.into()) => {}
            }
            self.absorb_all();
        }
        let running = self.queue.unfinished();
        if running > 0 && !abort.is_cancelled() {
            tracing::warn!(
                stream = self.protocol.stream.name,
                handlers = running,
                "handlers did not finish in time; their messages are handed back"
            );
        }
        self.workers.abort().await;
        self.absorb_all();
        let last_try = Instant::now() + TROUBLE.1;
        loop {
            match self.hand_back().await {
                Err(error) if error.is_retryable() && Instant::now() < last_try => {
                    tokio::time::sleep(jittered(TROUBLE.0 * 2)).await;
                }
                result => return result,
            }
        }
    }

    /// Tells all there is to tell, and hands back the rest.
    async fn hand_back(&mut self) -> Result<()> {
        if self.has_settled() {
            self.settle_exceptions().await?;
        }
        if self.holding.lock().has_news(false) {
            self.advance(0, ALL).await?;
        }
        while let Some(orphan) = self.orphans.last() {
            self.protocol.release_claim(*orphan).await?;
            self.orphans.pop();
        }
        let reports = self.holding.lock().last_words();
        self.release(&reports).await?;
        let exceptions = self.holding.lock().exceptions();
        self.release_exceptions(&exceptions).await
    }
}
