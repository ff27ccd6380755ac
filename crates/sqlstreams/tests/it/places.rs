//! One place per id: whatever calls run in whatever order, an id is above the cursor, in one lease, in one exception row
//! or resolved; and resolved is only what somebody settled or discarded.
//!
//! `SQLSTREAMS_SEED` repeats a run (each failure names its seed), `SQLSTREAMS_PLACES_STEPS` sets its length (300).

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fastrand::Rng;
use uuid::Uuid;

use crate::plain::{Lease, Plain, Verdict, ids_of, installed, set_of};
use crate::support::database;

/// What the actors know together.
#[derive(Debug, Default)]
struct Known {
    /// Settled or discarded by a call that was sent.
    intended: BTreeSet<i64>,
    /// Settled or discarded by a call that said so.
    resolved: BTreeSet<i64>,
}

/// A consumer that makes random calls, and keeps using leases that it has lost.
struct Actor {
    plain: Plain,
    random: Rng,
    leases: Vec<Lease>,
    exceptions: Vec<(Uuid, i64)>,
    known: Arc<Mutex<Known>>,
    /// It moves the group about, too, and replays.
    moving: bool,
}

impl Actor {
    fn new(plain: Plain, seed: u64, known: &Arc<Mutex<Known>>) -> Self {
        Self {
            plain,
            random: Rng::with_seed(seed),
            leases: Vec::new(),
            exceptions: Vec::new(),
            known: known.clone(),
            moving: false,
        }
    }

    /// One call; returns what it was.
    async fn step(&mut self) -> String {
        match self.random.u32(0..if self.moving { 26 } else { 22 }) {
            0..4 => self.claim().await,
            4..6 => self.advance().await,
            6..9 => self.settle().await,
            9..11 => self.fail().await,
            11 => self.extend().await,
            12 => self.release().await,
            13..15 => self.claim_exceptions().await,
            15..17 => self.settle_exceptions().await,
            17 => self.hand_back_exceptions().await,
            18 => self.redrive_or_discard().await,
            19 => {
                self.plain.all_due().await;
                "all due".into()
            }
            20 => self.run_out().await,
            22 | 23 => self.seek().await,
            24 => self.replay().await,
            25 => self.cancel().await,
            _ => self.produce().await,
        }
    }

    async fn produce(&mut self) -> String {
        let (burnt, made) = (self.random.i64(0..3), self.random.i64(1..15));
        if burnt > 0 {
            self.plain.burn(burnt).await;
        }
        self.plain.produce(made).await;
        self.plain.let_look().await;
        format!("burn {burnt}, produce {made}")
    }

    async fn claim(&mut self) -> String {
        let limit = self.random.i64(1..25);
        let lease = self.plain.claim(limit).await;
        let what = format!("claim {limit}: {lease:?}");
        self.leases.extend(lease);
        what
    }

    /// A lease to speak of, and some of its ids.
    fn pick(&mut self) -> Option<(Lease, Vec<i64>)> {
        let lease = self.leases.get(self.random.usize(0..self.leases.len().max(1)))?.clone();
        let share = self.random.u32(0..4);
        let mut ids: Vec<i64> = ids_of(&lease.pending).into_iter().collect();
        ids.retain(|_| self.random.u32(0..3) < share);
        Some((lease, ids))
    }

    /// The set to settle: these ids, now and then with others that are not in the lease.
    fn done(&mut self, lease: &Lease, ids: &[i64]) -> (String, BTreeSet<i64>) {
        match self.random.u32(0..6) {
            0 => ("{(,)}".into(), ids_of(&lease.pending)),
            1 => {
                let foreign = self.random.i64(1..200);
                let named: BTreeSet<i64> = ids.iter().copied().chain([foreign]).collect();
                let held = ids_of(&lease.pending);
                (set_of(&named), named.intersection(&held).copied().collect())
            }
            _ => (set_of(ids), ids.iter().copied().collect()),
        }
    }

    fn intend(&self, ids: &BTreeSet<i64>) {
        self.known.lock().unwrap().intended.extend(ids);
    }

    /// The server has taken it: those are resolved, and no longer in the lease as we know it.
    fn took(&mut self, lease: &Lease, done: &BTreeSet<i64>, failed: &BTreeSet<i64>) {
        self.known.lock().unwrap().resolved.extend(done.difference(failed));
        if let Some(known) = self.leases.iter_mut().find(|l| l.token == lease.token) {
            let left: BTreeSet<i64> = ids_of(&known.pending)
                .into_iter()
                .filter(|id| !done.contains(id) && !failed.contains(id))
                .collect();
            known.pending = set_of(&left);
        }
        self.leases.retain(|l| !ids_of(&l.pending).is_empty());
    }

    async fn settle(&mut self) -> String {
        let Some((lease, ids)) = self.pick() else { return "nothing to settle".into() };
        let (set, done) = self.done(&lease, &ids);
        self.intend(&done);
        let settled = self.plain.settle(&lease, &set).await;
        if settled {
            self.took(&lease, &done, &BTreeSet::new());
        }
        format!("settle {lease:?} {set}: {settled}")
    }

    fn verdicts(&mut self, ids: &[i64]) -> Vec<Verdict> {
        ids.iter()
            .map(|id| {
                let outcome = ["retry", "dead", "delay"][self.random.usize(0..3)];
                (*id, outcome, self.random.bool().then_some(0.0))
            })
            .collect()
    }

    async fn fail(&mut self) -> String {
        let Some((lease, mut ids)) = self.pick() else { return "nothing to fail".into() };
        let own: BTreeSet<i64> = ids.iter().copied().collect();
        if self.random.u32(0..4) == 0 {
            ids.push(self.random.i64(1..200));
        }
        let foreign_is_own = ids_of(&lease.pending);
        let verdicts = self.verdicts(&ids);
        let failed = self.plain.fail(&lease, &verdicts).await;
        if failed {
            let gone: BTreeSet<i64> = ids
                .iter()
                .copied()
                .filter(|id| own.contains(id) || foreign_is_own.contains(id))
                .collect();
            self.took(&lease, &BTreeSet::new(), &gone);
        }
        format!("fail {lease:?} {verdicts:?}: {failed}")
    }

    async fn advance(&mut self) -> String {
        let Some((lease, ids)) = self.pick() else { return self.claim().await };
        let (failing, finishing) = ids.split_at(self.random.usize(0..=ids.len()));
        let verdicts: Vec<_> =
            self.verdicts(failing).into_iter().map(|v| (lease.token, v)).collect();
        let (set, mut done) = self.done(&lease, finishing);
        let failed: BTreeSet<i64> = failing.iter().copied().collect();
        done.retain(|id| !failed.contains(id));
        self.intend(&done);
        let limit = self.random.i64(0..20);
        let (lost, new) =
            self.plain.try_advance(&[(&lease, &set)], &verdicts, limit).await.unwrap();
        if lost.is_empty() {
            self.took(&lease, &done, &failed);
        }
        let what = format!("advance {lease:?} {set} {verdicts:?}: {lost:?} {new:?}");
        self.leases.extend(new);
        what
    }

    async fn extend(&mut self) -> String {
        let Some((lease, ids)) = self.pick() else { return "nothing to extend".into() };
        let (set, done) = self.done(&lease, &ids);
        self.intend(&done);
        let seqs = self.plain.extend(&[(&lease, &set)]).await;
        if let Some(seq) = seqs[0] {
            self.took(&lease, &done, &BTreeSet::new());
            self.leases.iter_mut().filter(|l| l.token == lease.token).for_each(|l| l.seq = seq);
        }
        format!("extend {lease:?} {set}: {seqs:?}")
    }

    async fn release(&mut self) -> String {
        let Some((lease, ids)) = self.pick() else { return "nothing to release".into() };
        let (set, done) = self.done(&lease, &ids);
        self.intend(&done);
        let lost = self.plain.release(&[(&lease, &set)]).await;
        if lost.is_empty() {
            // The lease itself is kept here, as a zombie's.
            self.took(&lease, &done, &BTreeSet::new());
        }
        format!("release {lease:?} {set}: {lost:?}")
    }

    async fn claim_exceptions(&mut self) -> String {
        let (limit, suspect) = (self.random.i64(1..8), self.random.bool());
        let (token, ids) = self.plain.claim_exceptions(limit, suspect).await;
        assert!(!suspect || ids.len() <= 1, "suspects run alone");
        self.exceptions.extend(ids.iter().map(|id| (token, *id)));
        format!("claim exceptions {limit} suspect {suspect}: {token} {ids:?}")
    }

    /// Some of the exceptions that were claimed together.
    fn pick_exceptions(&mut self) -> Option<(Uuid, Vec<i64>)> {
        let token = self.exceptions.get(self.random.usize(0..self.exceptions.len().max(1)))?.0;
        let ids = self.exceptions.iter().filter(|e| e.0 == token).map(|e| e.1);
        Some((token, ids.filter(|_| self.random.u32(0..3) > 0).collect()))
    }

    async fn settle_exceptions(&mut self) -> String {
        let Some((token, ids)) = self.pick_exceptions() else { return "no exceptions".into() };
        let verdicts: Vec<Verdict> = ids
            .iter()
            .map(|id| (*id, ["ok", "retry", "dead", "delay"][self.random.usize(0..4)], Some(0.0)))
            .collect();
        let fine: BTreeSet<i64> = verdicts.iter().filter(|v| v.1 == "ok").map(|v| v.0).collect();
        self.intend(&fine);
        let lost: BTreeSet<i64> =
            self.plain.settle_exceptions(token, &verdicts).await.into_iter().collect();
        self.known.lock().unwrap().resolved.extend(fine.difference(&lost));
        self.exceptions.retain(|e| e.0 != token || !ids.contains(&e.1) || lost.contains(&e.1));
        format!("settle exceptions {token} {verdicts:?}: lost {lost:?}")
    }

    async fn hand_back_exceptions(&mut self) -> String {
        let Some((token, ids)) = self.pick_exceptions() else { return "no exceptions".into() };
        match self.random.bool() {
            true => format!(
                "extend {token} {ids:?}: {:?}",
                self.plain.extend_exceptions(token, &ids).await
            ),
            // Kept here, as a zombie's.
            false => format!(
                "release {token} {ids:?}: {:?}",
                self.plain.release_exceptions(token, &ids).await
            ),
        }
    }

    async fn redrive_or_discard(&mut self) -> String {
        let ids: Vec<i64> = (0..20).map(|_| self.random.i64(1..400)).collect();
        if self.random.bool() {
            return format!("redrive: {:?}", self.plain.redrive(&ids).await);
        }
        let ids = &ids[..5];
        self.intend(&ids.iter().copied().collect());
        let discarded = self.plain.discard(ids).await;
        self.known.lock().unwrap().resolved.extend(&discarded);
        format!("discard {ids:?}: {discarded:?}")
    }

    /// Moves the group. Nobody else runs: what becomes of each message is foretold.
    async fn seek(&mut self) -> String {
        let head = self.plain.db.query_one("SELECT sqlstreams.stream_head(1)", &[]).await.unwrap();
        let after = self.random.i64(0..=head.get::<_, i64>(0));
        let (keep, keep_dead) = (self.random.bool(), self.random.u32(0..3) > 0);
        let sql = format!(
            "SELECT m.id, m.id > c.claimed, e.state,
                    EXISTS (SELECT FROM {} AS l WHERE l.group_id = $1 AND l.pending @> m.id AND l.seq >= c.first_open)
             FROM {} AS m LEFT JOIN {} AS e ON e.group_id = $1 AND e.message_id = m.id,
                  (SELECT claimed, first_open FROM sqlstreams.consumer_group_cursor_1 WHERE group_id = $1 ORDER BY generation DESC LIMIT 1) AS c",
            self.plain.leases(),
            self.plain.log(),
            self.plain.exceptions()
        );
        let before = self.plain.db.query(&sql, &[&self.plain.group]).await.unwrap();
        let (unfinished, dead) =
            (if keep { "keep" } else { "drop" }, if keep_dead { "keep" } else { "repeat" });
        let sql = "SELECT after_id FROM sqlstreams.seek(1, $1, p_id => $2, p_unfinished => $3, p_dead => $4)";
        let row = self
            .plain
            .db
            .query_one(sql, &[&self.plain.group, &(after + 1), &unfinished, &dead])
            .await
            .unwrap();
        assert_eq!(row.get::<_, i64>(0), after);
        let mut known = self.known.lock().unwrap();
        for row in before {
            let (id, above): (i64, bool) = (row.get(0), row.get(1));
            match (id > after, row.get::<_, Option<&str>>(2), row.get(3)) {
                (false, Some("dead"), _) => {}
                (true, _, _) => {
                    known.resolved.remove(&id);
                }
                (false, Some(_), _) | (false, None, true) if keep => {}
                (false, state, leased) if above || leased || state.is_some() => {
                    known.resolved.insert(id);
                }
                (false, _, _) => {}
            }
        }
        format!("seek {after} {unfinished} {dead}")
    }

    async fn replay(&mut self) -> String {
        let (from, length) = (self.random.i64(1..300), self.random.i64(1..60));
        let sql = "SELECT replay, from_id, upto_id FROM sqlstreams.replay(1, $1, $2, $3)";
        match self.plain.db.query_one(sql, &[&self.plain.group, &from, &(from + length)]).await {
            Ok(row) => format!("replay {from} {length}: {:?}", row.get::<_, Option<i64>>(2)),
            // There are enough.
            Err(error) => {
                assert!(error.as_db_error().unwrap().message().contains("wait already"), "{error}");
                "replay refused".into()
            }
        }
    }

    async fn cancel(&mut self) -> String {
        // Pieces that were cut off and are given up now are as they were before: resolved.
        let sql = format!(
            "SELECT pending::text FROM {} WHERE group_id = $1 AND replay IS NOT NULL AND expires_at = '-infinity'",
            self.plain.leases()
        );
        let free = self.plain.db.query(&sql, &[&self.plain.group]).await.unwrap();
        let sql = "SELECT sqlstreams.cancel_replay(1, $1)";
        let ids: i64 = self.plain.db.query_one(sql, &[&self.plain.group]).await.unwrap().get(0);
        let free = free.iter().flat_map(|row| ids_of(row.get(0)));
        self.known.lock().unwrap().resolved.extend(free);
        format!("cancel {ids}")
    }

    /// Lets what somebody holds run out.
    async fn run_out(&mut self) -> String {
        match self.random.u32(0..3) {
            0 => self.plain.expire_exceptions().await,
            _ => {
                let sql = format!(
                    "UPDATE {0} SET expires_at = clock_timestamp() - interval '1 second'
                     WHERE (group_id, seq) IN (SELECT group_id, seq FROM {0} WHERE group_id = {1} AND random() < 0.5 ORDER BY seq FOR UPDATE SKIP LOCKED) AND expires_at > clock_timestamp()",
                    self.plain.leases(), self.plain.group
                );
                self.plain.db.batch_execute(&sql).await.unwrap();
            }
        }
        "leases run out".into()
    }
}

/// In how many places each message of the log is, in one snapshot; 0 means resolved.
async fn places(plain: &Plain) -> BTreeMap<i64, i64> {
    let sql = format!(
        "SELECT m.id, (m.id > c.claimed AND NOT (m.id <= coalesce(c.reread_to, 0) AND EXISTS (SELECT FROM {exceptions} AS e WHERE e.group_id = $1 AND e.message_id = m.id)))::int::bigint
              + (SELECT count(*) FROM {leases} AS l WHERE l.group_id = $1 AND l.pending @> m.id AND l.seq >= c.first_open)
              + (SELECT count(*) FROM {exceptions} AS e WHERE e.group_id = $1 AND e.message_id = m.id)
         FROM {log} AS m,
              (SELECT claimed, first_open, reread_to FROM sqlstreams.consumer_group_cursor_1 WHERE group_id = $1 ORDER BY generation DESC LIMIT 1) AS c",
        leases = plain.leases(),
        exceptions = plain.exceptions(),
        log = plain.log()
    );
    plain
        .db
        .query(&sql, &[&plain.group])
        .await
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect()
}

async fn set_up() -> (String, Plain, u64) {
    let url = database().await;
    let plain = installed(&url).await;
    plain
        .db
        .batch_execute("UPDATE sqlstreams.consumer_group SET max_reclaims = 1, max_attempts = 3, backoff_base = '1 millisecond'")
        .await
        .unwrap();
    plain.produce(100).await;
    let seed =
        env::var("SQLSTREAMS_SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    println!("SQLSTREAMS_SEED={seed}");
    (url, plain, seed)
}

/// Everything that is left gets settled; afterwards nothing may be anywhere but resolved, or dead.
async fn drain(plain: &Plain, known: &Arc<Mutex<Known>>) {
    plain.expire_leases().await;
    plain.expire_exceptions().await;
    let deadline = Instant::now() + Duration::from_secs(240);
    loop {
        assert!(
            Instant::now() < deadline,
            "the group cannot be drained: {:?}",
            places(plain).await
        );
        plain.let_look().await;
        let lease = plain.claim(1000).await;
        if let Some(lease) = &lease {
            assert!(plain.settle(lease, "{(,)}").await);
            known.lock().unwrap().resolved.extend(ids_of(&lease.pending));
        }
        plain.all_due().await;
        let mut any = lease.is_some();
        for suspect in [false, true] {
            // Suspects come one at a time, and there may be thousands.
            loop {
                let (token, ids) = plain.claim_exceptions(1000, suspect).await;
                if ids.is_empty() {
                    break;
                }
                let verdicts: Vec<_> = ids.iter().map(|id| (*id, "ok", None)).collect();
                assert!(plain.settle_exceptions(token, &verdicts).await.is_empty());
                known.lock().unwrap().resolved.extend(&ids);
                any = true;
            }
        }
        let row = plain
            .db
            .query_one(
                "SELECT sqlstreams.is_resolved(1, $1, sqlstreams.stream_head(1))",
                &[&plain.group],
            )
            .await
            .unwrap();
        if !any && row.get(0) {
            break;
        }
    }
    let dead: BTreeSet<i64> = plain
        .db
        .query(&format!("SELECT message_id, state FROM {}", plain.exceptions()), &[])
        .await
        .unwrap()
        .iter()
        .map(|row| {
            assert_eq!(row.get::<_, &str>(1), "dead");
            row.get(0)
        })
        .collect();
    let found = places(plain).await;
    let known = known.lock().unwrap();
    for (id, places) in found {
        assert_eq!(places == 0, known.resolved.contains(&id), "message {id}");
        assert_eq!(places, i64::from(dead.contains(&id)), "message {id}");
    }
}

#[tokio::test]
async fn an_id_is_in_one_place_after_every_call() {
    let (url, plain, seed) = set_up().await;
    let steps = env::var("SQLSTREAMS_PLACES_STEPS").map_or(300, |n| n.parse().unwrap());
    let known = Arc::<Mutex<Known>>::default();
    let mut actors = Vec::new();
    for number in 0..4 {
        actors.push(Actor::new(plain.again(&url).await, seed.wrapping_add(number), &known));
    }
    let mut random = Rng::with_seed(!seed);
    let mut kinds = BTreeSet::new();
    for step in 0..steps {
        let actor = random.usize(0..actors.len());
        let what = actors[actor].step().await;
        kinds.insert(what.split(' ').next().unwrap().to_owned());
        let found = places(&plain).await;
        let known = known.lock().unwrap();
        // Nobody else runs, so this is exact.
        for (id, places) in found {
            let expected = i64::from(!known.resolved.contains(&id));
            assert_eq!(
                places, expected,
                "message {id} after step {step} of seed {seed}, actor {actor}: {what}"
            );
        }
    }
    assert!(kinds.len() >= 10, "{kinds:?}");
    drain(&plain, &known).await;
}

/// The ids that are held because they are replayed.
async fn replayed(plain: &Plain) -> BTreeSet<i64> {
    let sql = format!(
        "SELECT (SELECT coalesce(range_agg(l.pending), '{{}}') FROM {} AS l WHERE l.group_id = $1 AND l.seq >= c.first_open AND l.replay IS NOT NULL)::text
         FROM (SELECT first_open FROM sqlstreams.consumer_group_cursor_1 WHERE group_id = $1 ORDER BY generation DESC LIMIT 1) AS c",
        plain.leases()
    );
    let row = plain.db.query_one(&sql, &[&plain.group]).await.unwrap();
    ids_of(row.get(0))
}

#[tokio::test]
async fn an_id_is_in_one_place_after_every_call_of_a_group_that_is_moved_and_replays() {
    let (url, plain, seed) = set_up().await;
    let steps = env::var("SQLSTREAMS_PLACES_STEPS").map_or(500, |n| n.parse().unwrap());
    let known = Arc::<Mutex<Known>>::default();
    let mut actors = Vec::new();
    for number in 0..4 {
        let mut actor = Actor::new(plain.again(&url).await, seed.wrapping_add(number), &known);
        actor.moving = true;
        actors.push(actor);
    }
    let mut random = Rng::with_seed(!seed);
    let mut kinds = BTreeSet::new();
    for step in 0..steps {
        let actor = random.usize(0..actors.len());
        let what = actors[actor].step().await;
        kinds.insert(what.split(' ').next().unwrap().to_owned());
        let found = places(&plain).await;
        let (held, claimed) = (replayed(&plain).await, plain.claimed().await);
        let mut known = known.lock().unwrap();
        // What is handed out again, or will be, since its dead letter was discarded or redriven before the cursor came by.
        known.resolved.retain(|id| !held.contains(id) && *id <= claimed);
        for (id, places) in found {
            let expected = i64::from(!known.resolved.contains(&id));
            assert_eq!(
                places, expected,
                "message {id} after step {step} of seed {seed}, actor {actor}: {what}"
            );
        }
    }
    assert!(kinds.contains("seek") && kinds.contains("replay"), "{kinds:?}");
    // Handed out while the group is drained, it would be settled, which is known, too.
    actors[0].cancel().await;
    drain(&plain, &known).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_id_is_in_one_place_while_calls_run_at_once() {
    let (url, plain, seed) = set_up().await;
    let known = Arc::<Mutex<Known>>::default();
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for number in 0..6 {
        let mut actor = Actor::new(plain.again(&url).await, seed.wrapping_add(number), &known);
        let stop = stop.clone();
        tasks.push(tokio::spawn(async move {
            let mut steps = 0;
            while !stop.load(Ordering::Relaxed) {
                actor.step().await;
                steps += 1;
            }
            steps
        }));
    }
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        // What is known to be resolved before the look must be, and what is after it must have been meant.
        let resolved = known.lock().unwrap().resolved.clone();
        let found = places(&plain).await;
        let known = known.lock().unwrap();
        for (id, places) in found {
            assert!(places <= 1, "message {id} is in {places} places, seed {seed}");
            assert!(
                places == 0 || !resolved.contains(&id),
                "message {id} was resolved and is back, seed {seed}"
            );
            assert!(
                places == 1 || known.intended.contains(&id),
                "message {id} vanished, seed {seed}"
            );
        }
    }
    stop.store(true, Ordering::Relaxed);
    let mut steps = 0;
    for task in tasks {
        steps += task.await.unwrap();
    }
    println!("{steps} calls by 6 sessions");
    drain(&plain, &known).await;
}
