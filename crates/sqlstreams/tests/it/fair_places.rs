//! In a fair group, too, a message is in one place at any time, whatever is claimed, cut, lost and handed back in whatever order.

use std::collections::{BTreeMap, BTreeSet};

use sqlstreams::Client;
use uuid::Uuid;

use crate::support::{connect, count, database};

/// A lease as a client knows it, also one that was lost meanwhile.
#[derive(Debug, Clone)]
struct Lease {
    seq: i64,
    token: Uuid,
    /// Its messages that the client has not told the end of.
    open: Vec<i64>,
    /// What else it is about.
    pending: String,
}

struct Model {
    db: tokio_postgres::Client,
    random: fastrand::Rng,
    leases: Vec<Lease>,
    exceptions: BTreeMap<i64, Uuid>,
    /// Ended as far as the server was told.
    ended: BTreeSet<i64>,
    /// Settled in a transaction of their handler.
    settled: BTreeSet<i64>,
    bound: bool,
    transactional: bool,
}

const GROUP: &str = "1, 1";

impl Model {
    async fn new(seed: u64) -> Self {
        let url = database().await;
        Client::connect(&url).await.unwrap();
        let db = connect(&url).await;
        let mut random = fastrand::Rng::with_seed(seed);
        let (bound, transactional, limited) = (random.bool(), random.bool(), random.u8(0..4) == 0);
        let bindings = if bound { "'[\"a.#\"]'" } else { "NULL" };
        let limit = if limited { "7" } else { "NULL" };
        db.batch_execute(&format!(
            "SELECT sqlstreams.create_stream('s');
             SELECT sqlstreams.create_group(1, 'g', p_mode => 'fair', p_bindings => {bindings}, p_transactional => {transactional},
                 p_max_attempts => 3, p_backoff_base => '0', p_backoff_cap => '0', p_max_in_flight => {limit})"
        ))
        .await
        .unwrap();
        let (leases, exceptions) = (Vec::new(), BTreeMap::new());
        let (ended, settled) = (BTreeSet::new(), BTreeSet::new());
        Self { db, random, leases, exceptions, ended, settled, bound, transactional }
    }

    /// A burst of one key, or a few of many; sometimes ids that never come.
    async fn produce(&mut self) {
        let keys = if self.random.bool() { 1 } else { 40 };
        let messages = self.random.u8(1..40);
        let first = self.random.u8(0..3);
        let sql = format!(
            "INSERT INTO sqlstreams.message_log_1 (key, routing_key, payload)
             SELECT CASE WHEN n % 7 > 0 THEN 'k' || ({first} + n % {keys}) END, CASE WHEN n % 3 = 0 THEN 'b' ELSE 'a' END, '1' FROM generate_series(1, {messages}) AS n"
        );
        let end = if self.random.u8(0..6) == 0 { "ROLLBACK" } else { "COMMIT" };
        self.db.batch_execute(&format!("BEGIN; {sql}; {end}")).await.unwrap();
    }

    /// Tells of some leases, and claims.
    async fn advance(&mut self) {
        let mut told: Vec<Lease> = Vec::new();
        while !self.leases.is_empty() && self.random.bool() {
            let at = self.random.usize(0..self.leases.len());
            told.push(self.leases.swap_remove(at));
        }
        let (mut seqs, mut tokens, mut done) = (vec![], vec![], vec![]);
        let (mut failed_tokens, mut failed, mut outcomes): (Vec<Uuid>, Vec<i64>, Vec<&str>) =
            Default::default();
        let mut ends: Vec<(Uuid, Vec<i64>, Vec<i64>)> = Vec::new();
        for lease in &mut told {
            let (mut ended, mut kept) = (Vec::new(), Vec::new());
            let all = self.random.bool();
            for id in std::mem::take(&mut lease.open) {
                match self.random.u8(0..10) {
                    0 => {
                        failed_tokens.push(lease.token);
                        failed.push(id);
                        outcomes.push(if self.random.bool() { "retry" } else { "delay" });
                        ended.push((id, false));
                    }
                    1..7 => ended.push((id, true)),
                    _ if all => ended.push((id, true)),
                    _ => kept.push(id),
                }
            }
            let good = ended.iter().filter(|e| e.1).map(|e| e.0).collect::<Vec<_>>();
            let gone = ended.iter().map(|e| e.0).collect::<Vec<_>>();
            // What holds no message is done as well.
            let sql = "SELECT ($1::text::int8multirange - coalesce((SELECT range_agg(int8range(i, i, '[]')) FROM unnest($2::bigint[]) AS i), '{}'))::text";
            let open: Vec<i64> = kept.iter().chain(&failed).copied().collect();
            let row = self.db.query_one(sql, &[&lease.pending, &open]).await.unwrap();
            seqs.push(lease.seq);
            tokens.push(lease.token);
            done.push(row.get::<_, String>(0));
            lease.open = kept;
            ends.push((lease.token, good, gone));
        }
        let limit = if self.random.u8(0..4) == 0 { 0 } else { self.random.i64(1..20) };
        let token = Uuid::from_u128(self.random.u128(..));
        let width = self.random.bool().then(|| self.random.i64(1..60));
        let lanes = if self.random.bool() { -1 } else { self.random.i64(..) };
        let heavy = if self.random.bool() { 0 } else { self.random.i64(..) & self.random.i64(..) };
        let shares =
            self.random.bool().then(|| (0..64).map(|_| self.random.f64() / 32.0).collect());
        let row = self
            .db
            .query_one(
                "SELECT lost, seq, pending::text, lanes, claimed, lowest
                 FROM sqlstreams.advance(1, 1, $1, $2, $3::text[]::int8multirange[], $4, $5::bigint[], $6, array_fill('no'::text, ARRAY[cardinality($5::bigint[])]), array_fill(NULL::float8, ARRAY[cardinality($5::bigint[])]),
                     $7, $8, NULL, $9, $10, $11, $12)
                 CROSS JOIN LATERAL (SELECT claimed, (SELECT min(position) FROM unnest(cohorts)) AS lowest FROM sqlstreams.consumer_group_cursor_1 ORDER BY generation DESC LIMIT 1) AS c",
                &[
                    &seqs, &tokens, &done, &failed_tokens, &failed, &outcomes, &limit, &token, &width,
                    &lanes, &heavy, &shares as &Option<Vec<f64>>,
                ],
            )
            .await
            .unwrap();
        let lost: Vec<Uuid> = row.get(0);
        for (token, good, _) in &ends {
            if !lost.contains(token) {
                self.ended.extend(good);
            }
        }
        // Of a lost one nothing was taken; what a handler settled counts all the same.
        told.retain(|lease| !lost.contains(&lease.token) && !lease.open.is_empty());
        self.leases.extend(told);
        if let Some(seq) = row.get::<_, Option<i64>>(1) {
            let mut lease = Lease { seq, token, open: Vec::new(), pending: row.get(2) };
            let sql =
                "SELECT id, lane FROM sqlstreams.fetch(1, 1, $1, 0, 100000, 100000000, NULL::json)";
            let claimed: Option<i64> = row.get(3);
            for row in self.db.query(sql, &[&token]).await.unwrap() {
                let lane: i16 = row.get(1);
                assert!(claimed.unwrap() >> lane & 1 == 1, "a message of another lane");
                lease.open.push(row.get(0));
            }
            if self.random.u8(0..8) > 0 {
                self.leases.push(lease);
            }
        }
    }

    async fn hand_back(&mut self) {
        if self.leases.is_empty() {
            return;
        }
        let at = self.random.usize(0..self.leases.len());
        let lease = self.leases[at].clone();
        if self.random.bool() {
            self.leases.swap_remove(at);
            let sql = format!(
                "SELECT sqlstreams.release({GROUP}, ARRAY[$1::bigint], ARRAY[$2::uuid], ARRAY['{{}}'::int8multirange])"
            );
            self.db.execute(&sql, &[&lease.seq, &lease.token]).await.unwrap();
        } else {
            let from = lease.open.get(lease.open.len() / 2).copied().unwrap_or(0);
            let sql = format!(
                "SELECT sqlstreams.release_part({GROUP}, $1, $2, int8multirange(int8range($3, NULL)))"
            );
            self.db.execute(&sql, &[&lease.seq, &lease.token, &from]).await.unwrap();
            self.leases[at].open.retain(|id| *id < from);
        }
    }

    /// Heartbeats; sometimes so late that the leases are moved.
    async fn extend(&mut self) {
        if self.random.bool() {
            let sql = "UPDATE sqlstreams.consumer_group_cursor_1 SET next_seq = next_seq + 1500";
            self.db.execute(sql, &[]).await.unwrap();
        }
        let seqs: Vec<i64> = self.leases.iter().map(|l| l.seq).collect();
        let tokens: Vec<Uuid> = self.leases.iter().map(|l| l.token).collect();
        let none: Vec<&str> = tokens.iter().map(|_| "{}").collect();
        let sql = format!(
            "SELECT token, seq FROM sqlstreams.extend({GROUP}, $1, $2, $3::text[]::int8multirange[])"
        );
        for row in self.db.query(&sql, &[&seqs, &tokens, &none]).await.unwrap() {
            let token: Uuid = row.get(0);
            match row.get::<_, Option<i64>>(1) {
                Some(seq) => {
                    self.leases.iter_mut().filter(|l| l.token == token).for_each(|l| l.seq = seq)
                }
                None => self.leases.retain(|l| l.token != token),
            }
        }
    }

    /// Leases run out; their holders do not know, as a rule.
    async fn lose(&mut self) {
        let sql = "UPDATE sqlstreams.consumer_lease_1 SET expires_at = clock_timestamp() WHERE random() < 0.5";
        self.db.execute(sql, &[]).await.unwrap();
        if self.random.bool() {
            self.leases.clear();
        }
    }

    async fn exceptions(&mut self) {
        let token = Uuid::from_u128(self.random.u128(..));
        let (limit, suspect) = (self.random.i64(1..10), self.random.bool());
        let lanes = if self.random.bool() { -1 } else { self.random.i64(..) };
        let sql = format!(
            "SELECT id, lane FROM sqlstreams.take_exceptions({GROUP}, $1, $2, $3, NULL, NULL, $4)"
        );
        for row in self.db.query(&sql, &[&token, &limit, &suspect, &lanes]).await.unwrap() {
            let lane: i16 = row.get(1);
            assert!(suspect || lanes >> lane & 1 == 1);
            self.exceptions.insert(row.get(0), token);
        }
        let held = std::mem::take(&mut self.exceptions);
        for (id, token) in held {
            if self.random.bool() {
                self.exceptions.insert(id, token);
                continue;
            }
            let sql = format!(
                "SELECT sqlstreams.settle_exceptions({GROUP}, ARRAY[$1::uuid], ARRAY[$2::bigint], ARRAY['ok'], ARRAY[NULL::text])"
            );
            let lost: Vec<i64> = self.db.query_one(&sql, &[&token, &id]).await.unwrap().get(0);
            if lost.is_empty() {
                self.ended.insert(id);
            }
        }
        if self.random.u8(0..4) == 0 {
            let sql = "UPDATE sqlstreams.exception_queue_1 SET lease_expires_at = clock_timestamp() WHERE state = 'inflight'";
            self.db.execute(sql, &[]).await.unwrap();
        }
    }

    /// A handler settles a message in its transaction, and nobody is told.
    async fn settle_in_transaction(&mut self) {
        if !self.transactional || self.leases.is_empty() {
            return;
        }
        let at = self.random.usize(0..self.leases.len());
        let Some(id) = self.leases[at].open.pop() else { return };
        let sql =
            format!("SELECT sqlstreams.settle_in_transaction({GROUP}, $1, ARRAY[$2::bigint])");
        if self.db.execute(&sql, &[&self.leases[at].token, &id]).await.is_ok() {
            assert!(self.settled.insert(id), "{id} was settled twice");
            assert!(!self.ended.contains(&id), "{id} was settled although it had ended");
        }
    }

    /// Each message is where it should be, and nowhere else.
    async fn check(&self, what: &str) {
        let sql = "
            SELECT m.id,
                   coalesce((SELECT sum((m.id > x.position)::int) FROM unnest(c.cohorts) AS x WHERE (x.lanes >> sqlstreams.lane_of(m.key, m.id)) & 1 = 1), -10)
                   + (SELECT count(*) FROM sqlstreams.consumer_lease_1 AS l WHERE l.pending @> m.id AND (coalesce(l.lanes, -1) >> sqlstreams.lane_of(m.key, m.id)) & 1 = 1)
                   + (SELECT count(*) FROM sqlstreams.exception_queue_1 AS e WHERE e.message_id = m.id),
                   EXISTS (SELECT FROM sqlstreams.consumer_done_1 AS d WHERE d.message_id = m.id)
            FROM sqlstreams.message_log_1 AS m, (SELECT * FROM sqlstreams.consumer_group_cursor_1 ORDER BY generation DESC LIMIT 1) AS c
            WHERE NOT $1 OR m.routing_key = 'a'";
        for row in self.db.query(sql, &[&self.bound]).await.unwrap() {
            let (id, places, done): (i64, i64, bool) = (row.get(0), row.get(1), row.get(2));
            // Settled in a transaction, it is in a place until the bookkeeping has caught up.
            let over = self.ended.contains(&id) || self.settled.contains(&id) && !done;
            assert_eq!(places, i64::from(!over), "{what}: message {id}");
        }
        let sql = "SELECT count(*) FROM (SELECT * FROM sqlstreams.consumer_group_cursor_1 ORDER BY generation DESC LIMIT 1) AS c
                   WHERE claimed <> (SELECT min(position) FROM unnest(cohorts)) OR (SELECT sum(sqlstreams.lane_count(lanes)) FROM unnest(cohorts)) <> 64
                      OR (SELECT count(DISTINCT position) FROM unnest(cohorts)) <> cardinality(cohorts)";
        assert_eq!(count(&self.db, sql).await, 0, "{what}: cohorts");
    }

    /// Everything is handled once more or less, and the group has it all behind it.
    async fn drain(&mut self) {
        self.leases.clear();
        self.exceptions.clear();
        self.db
            .batch_execute("UPDATE sqlstreams.consumer_lease_1 SET expires_at = '-infinity';
                            UPDATE sqlstreams.exception_queue_1 SET lease_expires_at = clock_timestamp() WHERE state = 'inflight'")
            .await
            .unwrap();
        for _ in 0..500 {
            let sql = "SELECT sqlstreams.is_resolved(1, 1, sqlstreams.stream_head(1))";
            if self.db.query_one(sql, &[]).await.unwrap().get(0) {
                return;
            }
            let token = Uuid::from_u128(self.random.u128(..));
            let sql = "SELECT seq, pending::text FROM sqlstreams.advance(1, 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 50, $1, NULL, 1000)";
            let row = self.db.query_one(sql, &[&token]).await.unwrap();
            if let Some(seq) = row.get::<_, Option<i64>>(0) {
                let sql =
                    "SELECT id FROM sqlstreams.fetch(1, 1, $1, 0, 100000, 100000000, NULL::json)";
                self.ended.extend(
                    self.db
                        .query(sql, &[&token])
                        .await
                        .unwrap()
                        .iter()
                        .map(|row| row.get::<_, i64>(0)),
                );
                let sql = format!("SELECT sqlstreams.settle({GROUP}, $1, $2, '{{[0,1000000)}}')");
                assert!(self.db.query_one(&sql, &[&seq, &token]).await.unwrap().get::<_, bool>(0));
            }
            let token = Uuid::from_u128(self.random.u128(..));
            let sql = format!(
                "WITH t AS MATERIALIZED (SELECT id FROM sqlstreams.take_exceptions({GROUP}, $1, 100, false, NULL) UNION ALL SELECT id FROM sqlstreams.take_exceptions({GROUP}, $1, 1, true, NULL))
                 SELECT array_agg(id) FROM t"
            );
            let ids: Option<Vec<i64>> = self.db.query_one(&sql, &[&token]).await.unwrap().get(0);
            for id in ids.unwrap_or_default() {
                let sql = format!(
                    "SELECT sqlstreams.settle_exceptions({GROUP}, ARRAY[$1::uuid], ARRAY[$2::bigint], ARRAY['ok'], ARRAY[NULL::text])"
                );
                self.db.execute(&sql, &[&token, &id]).await.unwrap();
                self.ended.insert(id);
            }
        }
        let sql = "SELECT concat_ws(' ', (SELECT array_agg(l) FROM sqlstreams.consumer_lease_1 AS l)::text, (SELECT array_agg((message_id, state, due_at, losses, lane)) FROM sqlstreams.exception_queue_1 WHERE state <> 'dead')::text,
                   (SELECT c FROM sqlstreams.consumer_group_cursor_1 AS c ORDER BY generation DESC LIMIT 1)::text, sqlstreams.stream_head(1))";
        let left: String = self.db.query_one(sql, &[]).await.unwrap().get(0);
        panic!("it does not come to an end: {left}");
    }
}

async fn play(seed: u64) {
    let mut model = Model::new(seed).await;
    for step in 0..120 {
        let what = model.random.u8(0..14);
        match what {
            0..2 => model.produce().await,
            2 => model.hand_back().await,
            3 => model.extend().await,
            4 => model.lose().await,
            5..7 => model.exceptions().await,
            7..9 => model.settle_in_transaction().await,
            _ => model.advance().await,
        }
        model.check(&format!("seed {seed}, step {step}, {what}")).await;
    }
    model.drain().await;
    model.check(&format!("seed {seed}, at the end")).await;
    let sql = "SELECT count(*) FROM sqlstreams.message_log_1 WHERE NOT $1 OR routing_key = 'a'";
    let messages: i64 = model.db.query_one(sql, &[&model.bound]).await.unwrap().get(0);
    let sql = "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'dead'";
    let dead = count(&model.db, sql).await;
    let over = model.ended.union(&model.settled).count() as i64;
    assert_eq!(over + dead, messages, "seed {seed}");
}

/// How many games are played.
fn games() -> u64 {
    std::env::var("SQLSTREAMS_GAMES").ok().and_then(|n| n.parse().ok()).unwrap_or(6)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_a_fair_group_is_in_one_place() {
    let first = std::env::var("SQLSTREAMS_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    for seed in first..first + games() {
        println!("seed {seed}");
        play(seed).await;
    }
}
