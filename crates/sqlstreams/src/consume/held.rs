//! What a consumer holds: leases of ranges, and claimed exceptions. Only bookkeeping, no I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use uuid::Uuid;

use super::ids::IdSet;
use super::protocol::{Claimed, ExceptionReport, LeaseReport};
use crate::outcome::Verdict;

/// A report names at most so many finished ranges of a lease: with as many gaps a lease stays a small row. What is left out
/// is named later.
const MOST_RANGES: usize = 64;

/// Where a message came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// A lease of a range.
    Lease(Uuid),
    /// An exception claimed under this token.
    Exception(Uuid),
}

/// One lease, and how far its messages are.
#[derive(Debug)]
struct Lease {
    seq: i64,
    token: Uuid,
    /// As the server has it.
    pending: IdSet,
    /// Messages with ids below this were fetched.
    fetched_to: i64,
    /// Fetched and not finished.
    open: BTreeSet<i64>,
    /// Failed and not reported yet.
    failed: BTreeMap<i64, Verdict>,
    /// Its messages are fetched one at a time: one of them could not be read.
    one_by_one: bool,
}

/// A claimed exception.
#[derive(Debug)]
struct Exception {
    token: Uuid,
    suspect: bool,
    /// Attempts that failed before.
    attempts: i32,
    fetched: bool,
}

impl Lease {
    /// With `failures`, what failed is reported too: the server makes rows of it before it takes `done` out, so that may
    /// cover it and stays a few ranges. Without, `done` leaves it out. At most `ranges` ranges, the largest; what is left
    /// out is reported later.
    fn report(&self, failures: bool, ranges: usize) -> LeaseReport {
        // Everything fetched that is not open. Ids for which there is no message are among it.
        let ended = self.pending.below_without(self.fetched_to, &self.open);
        let (done, failed) = match failures {
            true => (ended, self.failed.iter().map(|(id, v)| (*id, v.clone())).collect()),
            false => (ended.minus(&self.failed.keys().copied().collect()), Vec::new()),
        };
        LeaseReport { seq: self.seq, token: self.token, done: done.largest(ranges), failed }
    }

    fn is_fetched(&self) -> bool {
        self.pending.last().is_none_or(|last| self.fetched_to > last)
    }

    fn is_finished(&self) -> bool {
        self.is_fetched() && self.open.is_empty()
    }
}

/// All that is held.
#[derive(Debug, Default)]
pub(crate) struct Held {
    leases: HashMap<Uuid, Lease>,
    /// Claimed exceptions by id.
    exceptions: BTreeMap<i64, Exception>,
    /// How exceptions ended, not reported yet.
    settled: Vec<ExceptionReport>,
}

impl Held {
    /// A lease was claimed; nothing of it is fetched yet.
    pub(crate) fn claimed(&mut self, claimed: Claimed) {
        let Claimed { seq, token, pending } = claimed;
        let fetched_to = pending.first().unwrap_or(i64::MIN);
        self.leases.insert(
            token,
            Lease {
                seq,
                token,
                pending,
                fetched_to,
                open: BTreeSet::new(),
                failed: BTreeMap::new(),
                one_by_one: false,
            },
        );
    }

    /// Messages of a lease were fetched, in id order.
    pub(crate) fn fetched(&mut self, token: Uuid, ids: impl IntoIterator<Item = i64>, more: bool) {
        let Some(lease) = self.leases.get_mut(&token) else { return };
        lease.open.extend(ids);
        lease.fetched_to = match (more, lease.open.last()) {
            (false, _) => i64::MAX,
            (true, Some(last)) => lease.fetched_to.max(last + 1),
            (true, None) => lease.fetched_to,
        };
    }

    /// A lease with messages that were not fetched yet, the id after which they come, and whether to fetch them one by one.
    pub(crate) fn unfetched(&self) -> Option<(Uuid, i64, bool)> {
        let lease = self.leases.values().filter(|l| !l.is_fetched()).min_by_key(|l| l.seq)?;
        Some((lease.token, lease.fetched_to - 1, lease.one_by_one))
    }

    /// A message of the lease could not be read.
    pub(crate) fn fetch_one_by_one(&mut self, token: Uuid) {
        if let Some(lease) = self.leases.get_mut(&token) {
            lease.one_by_one = true;
        }
    }

    /// Exceptions were claimed: ids, and how often each has failed.
    pub(crate) fn claimed_exceptions(
        &mut self,
        token: Uuid,
        claimed: impl IntoIterator<Item = (i64, i32)>,
        suspect: bool,
    ) {
        self.exceptions.extend(
            claimed
                .into_iter()
                .map(|(id, attempts)| (id, Exception { token, suspect, attempts, fetched: false })),
        );
    }

    /// Claimed exceptions whose messages were not fetched yet.
    pub(crate) fn unfetched_exceptions(&self) -> Vec<i64> {
        self.exceptions.iter().filter(|(_, e)| !e.fetched).map(|(id, _)| *id).collect()
    }

    /// An exception's message is about to be run: where it came from and how often it has failed.
    pub(crate) fn fetched_exception(&mut self, id: i64) -> Option<(Source, i32)> {
        let exception = self.exceptions.get_mut(&id)?;
        exception.fetched = true;
        Some((Source::Exception(exception.token), exception.attempts))
    }

    /// A message was run to an end.
    pub(crate) fn finished(&mut self, source: Source, id: i64, verdict: Verdict) {
        match source {
            Source::Lease(token) => {
                // A lease that was lost meanwhile has no use for it.
                if let Some(lease) = self.leases.get_mut(&token)
                    && lease.open.remove(&id)
                    && verdict.outcome != "ok"
                {
                    lease.failed.insert(id, verdict);
                }
            }
            Source::Exception(token) => {
                if self.exceptions.get(&id).is_some_and(|held| held.token == token) {
                    self.exceptions.remove(&id);
                    self.settled.push(ExceptionReport { token, id, verdict });
                }
            }
        }
    }

    /// Whether a message is still ours to run.
    pub(crate) fn holds(&self, source: Source, id: i64) -> bool {
        match source {
            Source::Lease(token) => self.leases.get(&token).is_some_and(|l| l.open.contains(&id)),
            Source::Exception(token) => {
                self.exceptions.get(&id).is_some_and(|held| held.token == token)
            }
        }
    }

    /// How many messages are fetched and not finished.
    pub(crate) fn messages(&self) -> usize {
        self.leases.values().map(|l| l.open.len()).sum::<usize>() + self.exceptions.len()
    }

    /// Whether a suspect is among them.
    pub(crate) fn has_suspect(&self) -> bool {
        self.exceptions.values().any(|held| held.suspect)
    }

    /// Whether there is something that the server should hear soon: a finished lease or a failure.
    pub(crate) fn has_news(&self) -> bool {
        self.leases.values().any(|l| l.is_finished() || !l.failed.is_empty())
    }

    /// The reports of leases with news: finished ones, and failures.
    pub(crate) fn news(&self) -> Vec<LeaseReport> {
        let news = self.leases.values().filter(|l| l.is_finished() || !l.failed.is_empty());
        in_order(news.map(|l| l.report(true, MOST_RANGES)))
    }

    /// How far every lease is, without the failures: for a heartbeat.
    pub(crate) fn progress(&self) -> Vec<LeaseReport> {
        in_order(self.leases.values().map(|l| l.report(false, MOST_RANGES)))
    }

    /// All that is known, for handing the rest back: nothing of it would be told later.
    pub(crate) fn last_words(&self) -> Vec<LeaseReport> {
        in_order(self.leases.values().map(|l| l.report(false, usize::MAX)))
    }

    /// The server has taken these reports, but for the leases in `lost`. Returns how many leases were lost.
    pub(crate) fn reported(&mut self, reports: &[LeaseReport], lost: &[Uuid]) -> usize {
        for token in lost {
            self.leases.remove(token);
        }
        for report in reports {
            let Some(lease) = self.leases.get_mut(&report.token) else { continue };
            let failed: IdSet = report.failed.iter().map(|(id, _)| *id).collect();
            lease.pending = lease.pending.minus(&report.done).minus(&failed);
            for (id, _) in &report.failed {
                lease.failed.remove(id);
            }
            if lease.pending.is_empty() {
                self.leases.remove(&report.token);
            }
        }
        lost.len()
    }

    /// The server keeps a lease under another seq.
    pub(crate) fn moved(&mut self, token: Uuid, seq: i64) {
        if let Some(lease) = self.leases.get_mut(&token) {
            lease.seq = seq;
        }
    }

    /// How exceptions ended that the server has not heard of.
    pub(crate) fn settled(&self) -> &[ExceptionReport] {
        &self.settled
    }

    /// The server has heard of the first `count` of them.
    pub(crate) fn settled_reported(&mut self, count: usize) {
        self.settled.drain(..count);
    }

    /// Exceptions whose lease was lost.
    pub(crate) fn lost_exceptions(&mut self, ids: &[i64]) {
        for id in ids {
            self.exceptions.remove(id);
        }
    }

    /// Claimed exceptions that are not finished, with their tokens.
    pub(crate) fn exceptions(&self) -> Vec<(Uuid, i64)> {
        self.exceptions.iter().map(|(id, held)| (held.token, *id)).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.exceptions.is_empty() && self.settled.is_empty()
    }

    pub(crate) fn has_leases(&self) -> bool {
        !self.leases.is_empty()
    }
}

/// By seq: whoever locks leases does so in that order.
fn in_order(reports: impl Iterator<Item = LeaseReport>) -> Vec<LeaseReport> {
    let mut reports: Vec<_> = reports.collect();
    reports.sort_unstable_by_key(|r| r.seq);
    reports
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Outcome;

    fn held(range: std::ops::Range<i64>, ids: &[i64], more: bool) -> (Held, Uuid) {
        let (mut held, token) = (Held::default(), Uuid::new_v4());
        held.claimed(Claimed { seq: 1, token, pending: IdSet::range(range.start, range.end) });
        held.fetched(token, ids.iter().copied(), more);
        (held, token)
    }

    fn done(held: &Held) -> String {
        held.progress()[0].done.to_string()
    }

    #[test]
    fn ids_without_a_message_count_as_done() {
        let (mut held, token) = held(1..11, &[2, 3, 7], false);
        assert_eq!(done(&held), "{[1,2),[4,7),[8,11)}");
        for id in [2, 3, 7] {
            held.finished(Source::Lease(token), id, Outcome::Done.into());
        }
        assert!(held.has_news());
        let reports = held.news();
        assert_eq!(reports[0].done.to_string(), "{[1,11)}");
        held.reported(&reports, &[]);
        assert!(held.is_empty());
    }

    #[test]
    fn nothing_beyond_what_was_fetched_is_done() {
        let (held, token) = held(1..11, &[2, 3], true);
        assert_eq!(done(&held), "{[1,2)}");
        assert_eq!(held.unfetched(), Some((token, 3, false)));
    }

    #[test]
    fn failures_are_reported_once_and_never_as_done() {
        let (mut held, token) = held(1..4, &[1, 2, 3], false);
        held.finished(Source::Lease(token), 2, Outcome::Retry("no".into()).into());
        let reports = held.news();
        // The failure may be covered by what is done: it is taken out first.
        assert_eq!((reports[0].done.to_string().as_str(), reports[0].failed.len()), ("{[2,3)}", 1));
        assert_eq!(done(&held), "{}");
        held.reported(&reports, &[]);
        assert!(!held.has_news());
        held.finished(Source::Lease(token), 1, Outcome::Done.into());
        held.finished(Source::Lease(token), 3, Outcome::Done.into());
        assert_eq!(done(&held), "{[1,2),[3,4)}");
    }

    #[test]
    fn a_finished_lease_with_scattered_failures_is_told_at_once() {
        let ids: Vec<i64> = (1..1001).collect();
        let (mut held, token) = held(1..1001, &ids, false);
        for id in ids {
            let outcome = if id % 2 == 0 { Outcome::Retry("no".into()) } else { Outcome::Done };
            held.finished(Source::Lease(token), id, outcome.into());
        }
        let reports = held.news();
        assert_eq!(
            (reports[0].done.to_string().as_str(), reports[0].failed.len()),
            ("{[1,1001)}", 500)
        );
        held.reported(&reports, &[]);
        assert!(held.is_empty());
    }

    #[test]
    fn what_ends_after_its_lease_was_lost_is_ignored() {
        let (mut held, token) = held(1..3, &[1, 2], false);
        let reports = held.progress();
        held.reported(&reports, &[token]);
        assert!(!held.holds(Source::Lease(token), 1));
        held.finished(Source::Lease(token), 1, Outcome::Retry("late".into()).into());
        assert!(held.is_empty() && !held.has_news());
    }

    #[test]
    fn a_failure_that_comes_while_a_report_is_under_way_is_kept() {
        let (mut held, token) = held(1..3, &[1, 2], false);
        held.finished(Source::Lease(token), 1, Outcome::Retry("first".into()).into());
        let reports = held.news();
        held.finished(Source::Lease(token), 2, Outcome::Retry("second".into()).into());
        held.reported(&reports, &[]);
        assert_eq!(held.news()[0].failed.len(), 1);
    }
}
