//! What a consumer of an ordered group holds: leases of lanes, and the exceptions claimed in them. Only bookkeeping, no I/O.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::calls::Claimed;
use super::crowd::{Crowd, Crowded};
use crate::consume::delivery::History;
use crate::consume::held::Source;
use crate::consume::ids::IdSet;
use crate::consume::protocol::ClaimedException;
use crate::consume::term::Term;
use crate::outcome::Verdict;

/// The outcome of an exception that was not run.
pub(super) const LEFT: &str = "left";

/// All that is held, under one fence: it is lost together.
#[derive(Debug)]
pub(super) struct Lanes {
    /// Under what it is held: new after each loss.
    pub(super) holder: Uuid,
    pub(super) term: Arc<Term>,
    leases: HashMap<Uuid, Lease>,
    /// Fetched and not ended, by id.
    open: HashMap<i64, Open>,
    failed: Vec<Failed>,
    ended: Vec<Ended>,
    /// Keys of which nothing may run until the server has heard that one of their messages failed.
    stopped: HashSet<String>,
    crowd: Crowd,
}

#[derive(Debug)]
struct Lease {
    /// Where it lay when it was claimed: it may have been moved since.
    seq: i64,
    /// It is for these; of what is finished some may be somebody else's again.
    lanes: u64,
    /// As the server has it, or more: what it has made exceptions of is not known here.
    pending: IdSet,
    /// Messages with ids below this were fetched.
    fetched_to: i64,
    open: BTreeSet<i64>,
    /// What the server makes exceptions of with the next call.
    dropped: BTreeSet<i64>,
    /// Claimed exceptions that have not been fetched.
    exceptions: Vec<ClaimedException>,
    suspect: bool,
    one_by_one: bool,
}

#[derive(Debug)]
struct Open {
    source: Source,
    key: Option<String>,
    lane: Option<usize>,
}

/// A first delivery that failed.
#[derive(Debug, Clone)]
pub(super) struct Failed {
    pub(super) token: Uuid,
    pub(super) id: i64,
    pub(super) verdict: Verdict,
}

/// An exception that ended.
#[derive(Debug, Clone)]
pub(super) struct Ended {
    pub(super) token: Uuid,
    pub(super) id: i64,
    pub(super) key: Option<String>,
    pub(super) verdict: Verdict,
}

/// What is told of one lease.
#[derive(Debug)]
pub(super) struct LeaseReport {
    pub(super) token: Uuid,
    pub(super) done: IdSet,
    /// Nothing of it is left.
    pub(super) finished: bool,
}

/// A lease of which what is not fetched yet is parted by lanes.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) token: Uuid,
    /// The ids above this one.
    pub(super) after: i64,
    pub(super) lanes: u64,
    /// Of the new leases: for its other lanes, and for `lanes`.
    pub(super) tokens: [Uuid; 2],
}

/// What is told in one call.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) leases: Vec<LeaseReport>,
    pub(super) failed: Vec<Failed>,
    pub(super) ended: Vec<Ended>,
    dropped: Vec<(Uuid, IdSet)>,
}

impl Lease {
    fn new(seq: i64, lanes: u64, pending: IdSet) -> Self {
        Self {
            seq,
            lanes,
            fetched_to: pending.first().unwrap_or(i64::MIN),
            pending,
            open: BTreeSet::new(),
            dropped: BTreeSet::new(),
            exceptions: Vec::new(),
            suspect: false,
            one_by_one: false,
        }
    }

    fn is_fetched(&self) -> bool {
        self.exceptions.is_empty() && self.pending.last().is_none_or(|last| self.fetched_to > last)
    }

    fn done(&self) -> IdSet {
        let kept: IdSet = self.dropped.iter().copied().collect();
        self.pending.below_without(self.fetched_to, &self.open).minus(&kept)
    }

    fn is_finished(&self) -> bool {
        self.is_fetched() && self.open.is_empty()
    }
}

impl Lanes {
    pub(super) fn new() -> Self {
        Self {
            holder: Uuid::new_v4(),
            // Nothing is held yet that could end.
            term: Arc::new(Term::new(Instant::now() + Duration::from_secs(3600))),
            leases: HashMap::new(),
            open: HashMap::new(),
            failed: Vec::new(),
            ended: Vec::new(),
            stopped: HashSet::new(),
            crowd: Crowd::new(),
        }
    }

    /// How many messages are fetched, or are exceptions, and have not ended.
    pub(super) fn messages(&self) -> usize {
        self.open.len() + self.leases.values().map(|l| l.exceptions.len()).sum::<usize>()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.failed.is_empty() && self.ended.is_empty()
    }

    pub(super) fn holds_suspect(&self) -> bool {
        self.leases.values().any(|lease| lease.suspect)
    }

    /// Lanes of which so many messages are held that the rest had better wait.
    pub(super) fn crowded(&self, target: usize, limited: bool) -> Crowded {
        match limited {
            true => Crowded { lanes: self.crowd.busy(), excess: 0 },
            false => self.crowd.crowded(target),
        }
    }

    /// A range was claimed, or exceptions.
    pub(super) fn claimed(&mut self, token: Uuid, claimed: Claimed) {
        let Claimed { seq, lanes, pending, exceptions, suspect, .. } = claimed;
        let lease = Lease { exceptions, suspect, ..Lease::new(seq, lanes, pending) };
        self.leases.insert(token, lease);
    }

    /// A lease of ranges with messages that were not fetched yet and are to be, the id after which they come, and whether to fetch
    /// them one by one.
    pub(super) fn unfetched(&self, crowded: u64) -> Option<(Uuid, i64, bool)> {
        let open = self.partly_fetched().filter(|(_, l)| l.lanes & crowded == 0);
        let (token, lease) = open.min_by_key(|(_, l)| l.seq)?;
        Some((*token, lease.fetched_to - 1, lease.one_by_one))
    }

    /// Lanes of which there is more in what is held: that comes before what follows in the log.
    pub(super) fn unfetched_lanes(&self) -> u64 {
        self.partly_fetched().fold(0, |lanes, (_, lease)| lanes | lease.lanes)
    }

    /// A lease that cannot be fetched further for the sake of some of its lanes only.
    pub(super) fn to_part(&self, crowded: u64) -> Option<Part> {
        let mixed = |l: &Lease| l.lanes & crowded != 0 && l.lanes & !crowded != 0;
        let (token, lease) = self.partly_fetched().find(|(_, l)| mixed(l))?;
        Some(Part {
            token: *token,
            after: lease.fetched_to - 1,
            lanes: lease.lanes & crowded,
            tokens: [Uuid::new_v4(), Uuid::new_v4()],
        })
    }

    /// It was parted.
    pub(super) fn parted(&mut self, part: &Part) {
        let Some(lease) = self.leases.get_mut(&part.token) else { return };
        let rest = lease.pending.from(part.after + 1);
        lease.pending = lease.pending.minus(&rest);
        lease.fetched_to = i64::MAX;
        let (seq, lanes) = (lease.seq, lease.lanes);
        for (token, lanes) in part.tokens.iter().zip([lanes & !part.lanes, part.lanes]) {
            self.leases.insert(*token, Lease::new(seq, lanes, rest.clone()));
        }
    }

    fn partly_fetched(&self) -> impl Iterator<Item = (&Uuid, &Lease)> {
        self.leases.iter().filter(|(_, l)| !l.is_fetched() && l.exceptions.is_empty())
    }

    /// Exceptions whose messages were not fetched yet.
    pub(super) fn unfetched_exceptions(&self) -> Option<(Uuid, Vec<i64>)> {
        let (token, lease) = self.leases.iter().find(|(_, l)| !l.exceptions.is_empty())?;
        Some((*token, lease.exceptions.iter().map(|e| e.id).collect()))
    }

    pub(super) fn fetch_one_by_one(&mut self, token: Uuid) {
        if let Some(lease) = self.leases.get_mut(&token) {
            lease.one_by_one = true;
        }
    }

    /// A page of a lease was fetched: these ids, and whether there is more. Returns where they came from.
    pub(super) fn fetched(&mut self, token: Uuid, last: Option<i64>, more: bool) -> Option<Source> {
        let lease = self.leases.get_mut(&token)?;
        lease.fetched_to = match (more, last) {
            (false, _) => i64::MAX,
            (true, Some(last)) => lease.fetched_to.max(last + 1),
            (true, None) => lease.fetched_to,
        };
        Some(Source::Lease { token, seq: lease.seq })
    }

    /// An exception of the lease was fetched, or has no message any more.
    pub(super) fn fetched_exception(&mut self, token: Uuid, id: i64) -> Option<History> {
        let lease = self.leases.get_mut(&token)?;
        let at = lease.exceptions.iter().position(|e| e.id == id)?;
        let exception = lease.exceptions.remove(at);
        Some(History {
            attempts: u32::try_from(exception.attempts).unwrap_or(0),
            delays: u32::try_from(exception.delays).unwrap_or(0),
            first_failed_at: Some(exception.first_failed_at),
        })
    }

    /// A message is there to be run. Not if its key is stopped: then it goes back with the next call.
    pub(super) fn opened(
        &mut self,
        source: Source,
        id: i64,
        key: Option<&String>,
        lane: Option<usize>,
    ) -> bool {
        let token = token_of(source);
        let stopped = key.is_some_and(|key| self.stopped.contains(key));
        let Some(lease) = self.leases.get_mut(&token) else { return false };
        match (stopped, source) {
            (false, _) => {
                lease.open.insert(id);
                if let (Some(key), Some(lane)) = (key, lane) {
                    self.crowd.came(key, lane);
                }
                self.open.insert(id, Open { source, key: key.cloned(), lane });
                true
            }
            (true, Source::Lease { .. }) => {
                lease.dropped.insert(id);
                false
            }
            (true, Source::Exception(_)) => {
                self.ended.push(Ended { token, id, key: key.cloned(), verdict: left() });
                false
            }
        }
    }

    /// A message has ended. Says whether that counts, which it does not when it was lost; and the key of which nothing may run
    /// now until the server has heard of it.
    pub(super) fn finished(
        &mut self,
        source: Source,
        id: i64,
        verdict: Verdict,
    ) -> (bool, Option<String>) {
        let token = token_of(source);
        if self.open.get(&id).is_none_or(|open| open.source != source) {
            return (false, None);
        }
        let outcome = verdict.outcome;
        if outcome == Verdict::CANCELLED {
            // It stays open: nobody else may have it before this holder is lost, or hands it back.
            return (false, None);
        }
        let Some(Open { key, .. }) = self.close(id) else { return (false, None) };
        if let Some(lease) = self.leases.get_mut(&token) {
            lease.open.remove(&id);
            if matches!(source, Source::Lease { .. }) && outcome != "ok" {
                lease.dropped.insert(id);
            }
        }
        match source {
            Source::Lease { .. } if outcome == "ok" => {}
            Source::Lease { .. } => self.failed.push(Failed { token, id, verdict }),
            Source::Exception(_) => {
                self.ended.push(Ended { token, id, key: key.clone(), verdict });
            }
        }
        let stopped = key.filter(|_| outcome == "retry" || outcome == "delay");
        if let Some(key) = &stopped {
            self.stop(key);
        }
        (true, stopped)
    }

    fn close(&mut self, id: i64) -> Option<Open> {
        let open = self.open.remove(&id)?;
        if let (Some(key), Some(lane)) = (&open.key, open.lane) {
            self.crowd.went(key, lane);
        }
        Some(open)
    }

    /// The server makes exceptions of all that is fetched of a key.
    fn stop(&mut self, key: &str) {
        self.stopped.insert(key.to_owned());
        let ids: Vec<i64> = self
            .open
            .iter()
            .filter(|(_, open)| open.key.as_deref() == Some(key))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            let Some(Open { source, key, .. }) = self.close(id) else { continue };
            let token = token_of(source);
            if let Some(lease) = self.leases.get_mut(&token) {
                lease.open.remove(&id);
                if matches!(source, Source::Lease { .. }) {
                    lease.dropped.insert(id);
                }
            }
            if matches!(source, Source::Exception(_)) {
                self.ended.push(Ended { token, id, key, verdict: left() });
            }
        }
    }

    /// Whether the server should hear something soon.
    pub(super) fn has_news(&self) -> bool {
        !self.failed.is_empty()
            || !self.ended.is_empty()
            || self.leases.values().any(Lease::is_finished)
    }

    /// All there is to tell, of all leases.
    pub(super) fn report(&self) -> Report {
        let told = |(token, lease): (&Uuid, &Lease)| LeaseReport {
            token: *token,
            done: lease.done(),
            finished: lease.is_finished(),
        };
        let leases = self.leases.iter().map(told).collect();
        let dropped = self.leases.iter().filter(|(_, l)| !l.dropped.is_empty());
        Report {
            leases,
            failed: self.failed.clone(),
            ended: self.ended.clone(),
            dropped: dropped.map(|(t, l)| (*t, l.dropped.iter().copied().collect())).collect(),
        }
    }

    /// The server has taken a report that was sent at `sent`, and keeps the rest for another while.
    pub(super) fn reported(&mut self, report: &Report, sent: Instant, lease_duration: Duration) {
        for told in &report.leases {
            if told.finished {
                self.leases.remove(&told.token);
            } else if let Some(lease) = self.leases.get_mut(&told.token) {
                lease.pending = lease.pending.minus(&told.done);
            }
        }
        for (token, dropped) in &report.dropped {
            if let Some(lease) = self.leases.get_mut(token) {
                lease.pending = lease.pending.minus(dropped);
                lease.dropped.clear();
            }
        }
        self.failed.clear();
        self.ended.clear();
        self.stopped.clear();
        self.term.extend(sent + lease_duration);
    }

    /// Nothing is ours any more: goes on as another holder.
    pub(super) fn forget(&mut self) {
        self.term.end();
        *self = Self::new();
    }
}

pub(super) fn left() -> Verdict {
    Verdict { outcome: LEFT, ..Verdict::cancelled() }
}

fn token_of(source: Source) -> Uuid {
    match source {
        Source::Lease { token, .. } | Source::Exception(token) => token,
    }
}
