//! What a consumer holds: leases of ranges, and claimed exceptions. Only bookkeeping, no I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use uuid::Uuid;

use super::fairness::ALL;
use super::ids::IdSet;
use super::protocol::{Claimed, ClaimedException, ExceptionReport, LeaseReport, Surplus};
use super::term::{Term, margin};
use crate::outcome::Verdict;

/// A report names at most so many finished ranges of a lease: with as many gaps a lease stays a small row. What is left out
/// is named later.
const MOST_RANGES: usize = 64;

/// Where a message came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// A lease of a range, and where it lay when it was claimed: it may have been moved since.
    Lease { token: Uuid, seq: i64 },
    /// An exception claimed under this token.
    Exception(Uuid),
}

/// One lease, and how far its messages are.
#[derive(Debug)]
struct Lease {
    seq: i64,
    token: Uuid,
    term: Arc<Term>,
    /// As the server has it.
    pending: IdSet,
    lanes: Option<i64>,
    /// Messages with ids below this were fetched.
    fetched_to: i64,
    /// Fetched and not finished.
    open: BTreeSet<i64>,
    /// Those of the open ones that will not be run here any more.
    left: BTreeSet<i64>,
    /// Failed and not reported yet.
    failed: BTreeMap<i64, Verdict>,
    /// Its messages are fetched one at a time: one of them could not be read.
    one_by_one: bool,
}

/// Exceptions that were claimed together.
#[derive(Debug)]
struct Batch {
    term: Arc<Term>,
    suspect: bool,
    count: usize,
}

/// A claimed exception.
#[derive(Debug)]
struct Exception {
    token: Uuid,
    attempts: i32,
    delays: i32,
    first_failed_at: SystemTime,
    lane: Option<i16>,
    fetched: bool,
    /// It will not be run here any more.
    left: bool,
}

/// What is known of an exception that is about to be run.
#[derive(Debug, Clone)]
pub(crate) struct Retry {
    pub(crate) source: Source,
    pub(crate) attempts: i32,
    pub(crate) delays: i32,
    pub(crate) first_failed_at: SystemTime,
    pub(crate) lane: Option<i16>,
    pub(crate) term: Arc<Term>,
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

    /// What was not fetched yet.
    fn unfetched(&self) -> IdSet {
        self.pending.from(self.fetched_to)
    }

    fn is_fetched(&self) -> bool {
        self.pending.last().is_none_or(|last| self.fetched_to > last)
    }

    fn is_finished(&self) -> bool {
        self.is_fetched() && self.open.is_empty()
    }

    /// Nothing of it runs, and what is left will not: it can be handed back. What is left of a lease that is still ours
    /// was in a batch with messages of one that was lost.
    fn is_spent(&self) -> bool {
        (self.term.is_over() || !self.left.is_empty())
            && self.open.len() == self.left.len()
            && self.failed.is_empty()
    }

    /// Whether the server should hear of it soon; with `all`, whether there is anything to hear.
    fn is_news(&self, all: bool) -> bool {
        self.is_finished() || !self.failed.is_empty() || all && self.has_any_news()
    }

    /// Something of it ended that the server has not heard of.
    fn has_any_news(&self) -> bool {
        !self.failed.is_empty()
            || !self.pending.below_without(self.fetched_to, &self.open).is_empty()
    }
}

/// All that is held.
#[derive(Debug, Default)]
pub(crate) struct Held {
    leases: HashMap<Uuid, Lease>,
    batches: HashMap<Uuid, Batch>,
    /// Claimed exceptions by id.
    exceptions: BTreeMap<i64, Exception>,
    /// How exceptions ended, not reported yet.
    settled: Vec<ExceptionReport>,
    /// As the server said last; zero until it has.
    lease_duration: Duration,
    /// Handlers that run on although what they handle was lost.
    abandoned: usize,
}

impl Held {
    /// A lease was claimed by a call that was sent at `sent`; nothing of it is fetched yet. Its term is over when the returned
    /// token is cancelled.
    pub(crate) fn claimed(&mut self, claimed: Claimed, sent: Instant) -> Arc<Term> {
        let Claimed { seq, token, pending, lanes, lease_duration } = claimed;
        let fetched_to = pending.first().unwrap_or(i64::MIN);
        self.lease_duration = lease_duration;
        let term = Arc::new(Term::new(sent + lease_duration));
        self.leases.insert(
            token,
            Lease {
                seq,
                token,
                term: term.clone(),
                pending,
                lanes,
                fetched_to,
                open: BTreeSet::new(),
                left: BTreeSet::new(),
                failed: BTreeMap::new(),
                one_by_one: false,
            },
        );
        term
    }

    /// Messages of a lease were fetched, in id order. Returns the lease's token of cancellation if they are to be run.
    pub(crate) fn fetched(
        &mut self,
        token: Uuid,
        ids: impl IntoIterator<Item = i64>,
        more: bool,
    ) -> Option<(Source, Arc<Term>)> {
        let lease = self.leases.get_mut(&token)?;
        if lease.term.is_over() {
            return None;
        }
        lease.open.extend(ids);
        lease.fetched_to = match (more, lease.open.last()) {
            (false, _) => i64::MAX,
            (true, Some(last)) => lease.fetched_to.max(last + 1),
            (true, None) => lease.fetched_to,
        };
        Some((Source::Lease { token, seq: lease.seq }, lease.term.clone()))
    }

    /// A lease with messages that were not fetched yet, the id after which they come, and whether to fetch them one by one. Only
    /// one that is for none but these lanes.
    pub(crate) fn unfetched(&self, lanes: i64) -> Option<(Uuid, i64, bool)> {
        let is_wanted = |l: &Lease| l.lanes.unwrap_or(ALL) & !lanes == 0;
        let open = |l: &&Lease| !l.is_fetched() && !l.term.is_over() && is_wanted(l);
        let lease = self.leases.values().filter(open).min_by_key(|l| l.seq)?;
        Some((lease.token, lease.fetched_to - 1, lease.one_by_one))
    }

    /// How many ids leases hold beyond what was fetched of them, each with its lanes.
    pub(crate) fn unfetched_ids(&self) -> Vec<(i64, usize)> {
        let open = self.leases.values().filter(|l| !l.is_fetched() && !l.term.is_over());
        open.map(|l| (l.lanes.unwrap_or(ALL), l.unfetched().len())).collect()
    }

    /// The last id of a lease.
    pub(crate) fn last_id(&self, token: Uuid) -> Option<i64> {
        self.leases.get(&token)?.pending.last()
    }

    /// The lanes of a lease.
    pub(crate) fn lanes(&self, token: Uuid) -> i64 {
        self.leases.get(&token).and_then(|l| l.lanes).unwrap_or(ALL)
    }

    /// The lanes of claimed exceptions whose messages were not fetched yet.
    pub(crate) fn unfetched_lanes(&self) -> impl Iterator<Item = i16> {
        self.exceptions.values().filter(|e| !e.fetched && !e.left).filter_map(|e| e.lane)
    }

    /// A message of the lease could not be read.
    pub(crate) fn fetch_one_by_one(&mut self, token: Uuid) {
        if let Some(lease) = self.leases.get_mut(&token) {
            lease.one_by_one = true;
        }
    }

    /// Exceptions were claimed together, by a call that was sent at `sent`.
    pub(crate) fn claimed_exceptions(
        &mut self,
        token: Uuid,
        claimed: Vec<ClaimedException>,
        suspect: bool,
        lease_duration: Duration,
        sent: Instant,
    ) {
        self.lease_duration = lease_duration;
        let term = Arc::new(Term::new(sent + lease_duration));
        self.batches.insert(token, Batch { term, suspect, count: claimed.len() });
        self.exceptions.extend(claimed.into_iter().map(|c| {
            let ClaimedException { id, attempts, delays, first_failed_at, lane } = c;
            let (fetched, left) = (false, false);
            let exception =
                Exception { token, attempts, delays, first_failed_at, lane, fetched, left };
            (id, exception)
        }));
    }

    /// Claimed exceptions whose messages were not fetched yet.
    pub(crate) fn unfetched_exceptions(&self) -> Vec<i64> {
        self.exceptions.iter().filter(|(_, e)| !e.fetched && !e.left).map(|(id, _)| *id).collect()
    }

    /// An exception's message is about to be run.
    pub(crate) fn fetched_exception(&mut self, id: i64) -> Option<Retry> {
        let exception = self.exceptions.get_mut(&id)?;
        let batch = self.batches.get(&exception.token)?;
        exception.fetched = true;
        if batch.term.is_over() {
            exception.left = true;
            return None;
        }
        Some(Retry {
            source: Source::Exception(exception.token),
            attempts: exception.attempts,
            delays: exception.delays,
            first_failed_at: exception.first_failed_at,
            lane: exception.lane,
            term: batch.term.clone(),
        })
    }

    /// A message was run to an end. Says whether that counts: it does not when it was lost meanwhile, unless its handler's
    /// transaction has committed.
    pub(crate) fn finished(&mut self, source: Source, id: i64, verdict: Verdict) -> bool {
        if !self.runs(source, id) {
            self.abandoned = self.abandoned.saturating_sub(1);
            return verdict.settled;
        }
        if verdict.outcome == Verdict::CANCELLED {
            self.leave(source, id);
            return false;
        }
        match source {
            Source::Lease { token, .. } => {
                if let Some(lease) = self.leases.get_mut(&token) {
                    lease.open.remove(&id);
                    if verdict.outcome != "ok" {
                        lease.failed.insert(id, verdict);
                    }
                }
            }
            Source::Exception(token) => {
                self.drop_exception(id);
                // Settled in the handler's transaction, there is nothing left to say.
                if !verdict.settled {
                    self.settled.push(ExceptionReport { token, id, verdict });
                }
            }
        }
        true
    }

    /// A message that is held will not be run, or not to its end.
    pub(crate) fn leave(&mut self, source: Source, id: i64) {
        if !self.runs(source, id) {
            self.abandoned = self.abandoned.saturating_sub(1);
            return;
        }
        match source {
            Source::Lease { token, .. } => {
                if let Some(lease) = self.leases.get_mut(&token) {
                    lease.left.insert(id);
                }
            }
            Source::Exception(_) => {
                if let Some(exception) = self.exceptions.get_mut(&id) {
                    exception.left = true;
                }
            }
        }
    }

    /// Whether a message is ours and not given up.
    fn runs(&self, source: Source, id: i64) -> bool {
        match source {
            Source::Lease { token, .. } => self
                .leases
                .get(&token)
                .is_some_and(|l| l.open.contains(&id) && !l.left.contains(&id)),
            Source::Exception(token) => {
                self.exceptions.get(&id).is_some_and(|e| e.token == token && !e.left)
            }
        }
    }

    /// Whether a message may be started.
    pub(crate) fn may_start(&self, source: Source, id: i64) -> bool {
        let over = match source {
            Source::Lease { token, .. } => self.leases.get(&token).is_none_or(|l| l.term.is_over()),
            Source::Exception(token) => self.batches.get(&token).is_none_or(|b| b.term.is_over()),
        };
        !over && self.runs(source, id)
    }

    /// How many messages are fetched and not finished.
    pub(crate) fn messages(&self) -> usize {
        self.leases.values().map(|l| l.open.len()).sum::<usize>() + self.exceptions.len()
    }

    /// Handlers that run although what they handle was lost.
    pub(crate) fn abandoned(&self) -> usize {
        self.abandoned
    }

    /// Whether a suspect is among them.
    pub(crate) fn has_suspect(&self) -> bool {
        self.batches.values().any(|batch| batch.suspect)
    }

    /// Whether there is something that the server should hear soon: a finished lease or a failure; with `all`, anything.
    pub(crate) fn has_news(&self, all: bool) -> bool {
        self.leases.values().any(|l| l.is_news(all))
    }

    /// The reports of leases with news.
    pub(crate) fn news(&self, all: bool) -> Vec<LeaseReport> {
        in_order(
            self.leases.values().filter(|l| l.is_news(all)).map(|l| l.report(true, MOST_RANGES)),
        )
    }

    /// How far every lease is, without the failures: for a heartbeat.
    pub(crate) fn progress(&self) -> Vec<LeaseReport> {
        in_order(self.leases.values().map(|l| l.report(false, MOST_RANGES)))
    }

    /// All that is known, for handing the rest back: nothing of it would be told later.
    pub(crate) fn last_words(&self) -> Vec<LeaseReport> {
        in_order(self.leases.values().map(|l| l.report(false, usize::MAX)))
    }

    /// The last words on leases whose term is over and of which nothing runs any more.
    pub(crate) fn spent(&self) -> Vec<LeaseReport> {
        let spent = self.leases.values().filter(|l| l.is_spent());
        in_order(spent.map(|l| l.report(false, usize::MAX)))
    }

    /// Exceptions that will not be run here any more, with their tokens.
    pub(crate) fn left_exceptions(&self) -> Vec<(Uuid, i64)> {
        self.exceptions.iter().filter(|(_, e)| e.left).map(|(id, e)| (e.token, *id)).collect()
    }

    /// What of our leases will not be run here: taken from the queue again, and what comes after that in the same lease; with
    /// `unfetched`, whatever was not fetched.
    pub(crate) fn surplus(&self, unfetched: bool) -> Vec<Surplus> {
        let is_given = |l: &&Lease| !l.left.is_empty() || unfetched && !l.is_fetched();
        let given = self.leases.values().filter(|l| is_given(l) && !l.term.is_over());
        given
            .map(|lease| Surplus {
                seq: lease.seq,
                token: lease.token,
                part: lease.left.iter().copied().collect::<IdSet>().plus(&lease.unfetched()),
            })
            .collect()
    }

    /// It was handed back.
    pub(crate) fn parted(&mut self, surplus: &Surplus) {
        let Some(lease) = self.leases.get_mut(&surplus.token) else { return };
        lease.pending = lease.pending.minus(&surplus.part);
        lease.open.retain(|id| !lease.left.contains(id));
        lease.left.clear();
        lease.fetched_to = i64::MAX;
        if lease.pending.is_empty() {
            self.leases.remove(&surplus.token);
        }
    }

    /// The server has taken these reports, but for the leases in `lost`. Returns how many leases were lost.
    pub(crate) fn reported(&mut self, reports: &[LeaseReport], lost: &[Uuid]) -> usize {
        let mut count = 0;
        for token in lost {
            // One that is finished was settled by a call of ours that ran beside this one.
            count += usize::from(self.leases.get(token).is_some_and(|l| !l.is_finished()));
            self.forget(*token);
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
        count
    }

    /// A lease is not ours any more.
    fn forget(&mut self, token: Uuid) {
        if let Some(lease) = self.leases.remove(&token) {
            lease.term.end();
            self.abandoned += lease.open.len() - lease.left.len();
        }
    }

    /// The server keeps leases for another while, by a call that was sent at `sent`; some under another seq.
    pub(crate) fn extended(&mut self, token: Uuid, seq: i64, sent: Instant) {
        if let Some(lease) = self.leases.get_mut(&token) {
            lease.seq = seq;
            lease.term.extend(sent + self.lease_duration);
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

    /// Exceptions that are not ours any more. Returns how many of them were held.
    pub(crate) fn lost_exceptions(&mut self, ids: &[i64]) -> usize {
        let lost: Vec<Exception> = ids.iter().filter_map(|id| self.drop_exception(*id)).collect();
        self.abandoned += lost.iter().filter(|e| e.fetched && !e.left).count();
        lost.len()
    }

    fn drop_exception(&mut self, id: i64) -> Option<Exception> {
        let exception = self.exceptions.remove(&id)?;
        if let Some(batch) = self.batches.get_mut(&exception.token) {
            batch.count -= 1;
            if batch.count == 0 {
                self.batches.remove(&exception.token);
            }
        }
        Some(exception)
    }

    /// The server keeps claimed exceptions for another while, by a call that was sent at `sent`, for these tokens.
    pub(crate) fn extended_exceptions(&mut self, tokens: &BTreeSet<Uuid>, sent: Instant) {
        for (_, batch) in self.batches.iter_mut().filter(|(token, _)| tokens.contains(token)) {
            batch.term.extend(sent + self.lease_duration);
        }
    }

    /// Claimed exceptions that are not finished, with their tokens, in id order.
    pub(crate) fn exceptions(&self) -> Vec<(Uuid, i64)> {
        self.exceptions.iter().map(|(id, held)| (held.token, *id)).collect()
    }

    /// When the next term has to be taken for over.
    pub(crate) fn next_lapse(&self) -> Option<Instant> {
        self.terms()
            .filter(|term| !term.has_ended())
            .map(|term| term.until())
            .min()
            .map(|until| until - self.margin())
    }

    /// Ends the terms that nobody has extended in time; returns how many.
    pub(crate) fn lapse(&mut self, now: Instant) -> usize {
        let by = now + self.margin();
        let lapsed = self.terms().filter(|term| !term.has_ended() && term.until() <= by);
        lapsed.map(|term| term.end()).count()
    }

    /// How long before its lease runs out a handler is told to stop.
    pub(crate) fn margin(&self) -> Duration {
        margin(self.lease_duration)
    }

    pub(crate) fn lease_duration(&self) -> Duration {
        self.lease_duration
    }

    fn terms(&self) -> impl Iterator<Item = &Arc<Term>> {
        self.leases.values().map(|l| &l.term).chain(self.batches.values().map(|b| &b.term))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.exceptions.is_empty() && self.settled.is_empty()
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

    const LEASE: Duration = Duration::from_secs(15);

    fn held(range: std::ops::Range<i64>, ids: &[i64], more: bool) -> (Held, Uuid) {
        let (mut held, token) = (Held::default(), Uuid::new_v4());
        held.claimed(
            Claimed {
                seq: 1,
                token,
                pending: IdSet::range(range.start, range.end),
                lanes: None,
                lease_duration: LEASE,
            },
            Instant::now(),
        );
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
            held.finished(Source::Lease { token, seq: 1 }, id, Outcome::Done.into());
        }
        assert!(held.has_news(false));
        let reports = held.news(false);
        assert_eq!(reports[0].done.to_string(), "{[1,11)}");
        held.reported(&reports, &[]);
        assert!(held.is_empty());
    }

    #[test]
    fn nothing_beyond_what_was_fetched_is_done() {
        let (held, token) = held(1..11, &[2, 3], true);
        assert_eq!(done(&held), "{[1,2)}");
        assert_eq!(held.unfetched(ALL), Some((token, 3, false)));
    }

    #[test]
    fn failures_are_reported_once_and_never_as_done() {
        let (mut held, token) = held(1..4, &[1, 2, 3], false);
        held.finished(Source::Lease { token, seq: 1 }, 2, Outcome::Retry("no".into()).into());
        let reports = held.news(false);
        // The failure may be covered by what is done: it is taken out first.
        assert_eq!((reports[0].done.to_string().as_str(), reports[0].failed.len()), ("{[2,3)}", 1));
        assert_eq!(done(&held), "{}");
        held.reported(&reports, &[]);
        assert!(!held.has_news(false));
        held.finished(Source::Lease { token, seq: 1 }, 1, Outcome::Done.into());
        held.finished(Source::Lease { token, seq: 1 }, 3, Outcome::Done.into());
        assert_eq!(done(&held), "{[1,2),[3,4)}");
    }

    #[test]
    fn a_finished_lease_with_scattered_failures_is_told_at_once() {
        let ids: Vec<i64> = (1..1001).collect();
        let (mut held, token) = held(1..1001, &ids, false);
        for id in ids {
            let outcome = if id % 2 == 0 { Outcome::Retry("no".into()) } else { Outcome::Done };
            held.finished(Source::Lease { token, seq: 1 }, id, outcome.into());
        }
        let reports = held.news(false);
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
        assert!(!held.may_start(Source::Lease { token, seq: 1 }, 1));
        let source = Source::Lease { token, seq: 1 };
        assert!(!held.finished(source, 1, Outcome::Retry("late".into()).into()));
        assert!(held.is_empty() && !held.has_news(false));
        // What has committed was handled, whoever has the lease.
        assert!(held.finished(source, 2, Verdict::settled()));
        assert!(held.is_empty() && !held.has_news(false));
    }

    #[test]
    fn what_was_dropped_with_a_batch_is_handed_back_though_its_lease_lives() {
        let (mut held, token) = held(1..4, &[1, 2, 3], false);
        held.finished(Source::Lease { token, seq: 1 }, 1, Outcome::Done.into());
        held.finished(Source::Lease { token, seq: 1 }, 2, Verdict::cancelled());
        assert!(held.spent().is_empty(), "message 3 runs");
        held.finished(Source::Lease { token, seq: 1 }, 3, Verdict::cancelled());
        assert_eq!(held.spent()[0].done.to_string(), "{[1,2)}");
    }

    #[test]
    fn a_failure_that_comes_while_a_report_is_under_way_is_kept() {
        let (mut held, token) = held(1..3, &[1, 2], false);
        held.finished(Source::Lease { token, seq: 1 }, 1, Outcome::Retry("first".into()).into());
        let reports = held.news(false);
        held.finished(Source::Lease { token, seq: 1 }, 2, Outcome::Retry("second".into()).into());
        held.reported(&reports, &[]);
        assert_eq!(held.news(false)[0].failed.len(), 1);
    }
}
