//! Bindings that change: every id is judged by the set that held when it was claimed first, whoever has it in the end.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::plain::{Plain, installed};
use crate::reference::{Sample, is_for};
use crate::routing::send;
use crate::support::{count, database};

/// Routing keys and bindings that have to do with each other.
const KEYS: [Option<&str>; 7] =
    [None, Some("a"), Some("a.b"), Some("b"), Some("c.b"), Some("c"), Some("a.c.b")];

fn some_bindings(random: &mut Rng) -> Vec<Value> {
    let all = [
        json!("a.#"),
        json!("#.b"),
        json!("*"),
        json!("c.*"),
        json!("#"),
        json!("none"),
        json!({"headers": {"x": 1}}),
    ];
    let mut some = all.to_vec();
    random.shuffle(&mut some);
    // Now and then none at all: everything is for the group.
    some.truncate(random.usize(0..3));
    some
}

fn sample(random: &mut Rng) -> Sample {
    Sample {
        routing_key: KEYS[random.usize(0..KEYS.len())].map(str::to_owned),
        headers: random.bool().then(|| json!({"x": random.i32(0..2)})),
    }
}

/// A group, what was sent to it, and by what each id is to be judged.
struct Walk {
    plain: Plain,
    random: Rng,
    sent: BTreeMap<i64, Sample>,
    /// The cursor at each change, read beside it, and the bindings from there on.
    sets: Vec<(i64, Vec<Value>)>,
    leases: Vec<Leased>,
    exceptions: Vec<(Uuid, i64)>,
    handled: BTreeSet<i64>,
    suspects: usize,
}

/// A lease: what of it was fetched and not finished, and how far.
#[derive(Debug, Clone)]
struct Leased {
    seq: i64,
    token: Uuid,
    open: BTreeSet<i64>,
    fetched_to: i64,
}

impl Walk {
    fn is_for(&self, id: i64) -> bool {
        let set = self.sets.iter().rev().find(|(after, _)| *after < id);
        set.is_none_or(|(_, bindings)| is_for(bindings, &self.sent[&id]))
    }

    #[track_caller]
    fn received(&self, id: i64) {
        assert!(self.is_for(id), "{id} is not for the group: {:?}", self.sent[&id]);
        assert!(!self.handled.contains(&id), "{id} was handled");
    }

    async fn step(&mut self) {
        match self.random.u32(0..20) {
            0..3 => {
                let samples: Vec<Sample> =
                    (0..self.random.usize(1..20)).map(|_| sample(&mut self.random)).collect();
                let ids = send(&self.plain, &samples).await;
                self.sent.extend(std::iter::zip(ids, samples));
            }
            3..5 => self.change().await,
            5..9 => self.claim().await,
            9..12 => self.fetch().await,
            12..15 => self.settle().await,
            15 => self.release().await,
            16 => {
                // All leases run out.
                let sql = format!("UPDATE {} SET expires_at = now()", self.plain.leases());
                self.plain.db.batch_execute(&sql).await.unwrap();
            }
            17 => self.fail().await,
            _ => self.exceptions().await,
        }
    }

    async fn change(&mut self) {
        let bindings = some_bindings(&mut self.random);
        let text = Value::from(bindings.clone()).to_string();
        let db = &self.plain.db;
        db.batch_execute("BEGIN").await.unwrap();
        let set = "SELECT sqlstreams.set_bindings($1, $2, $3::text::jsonb)";
        let row = db.query_one(set, &[&self.plain.stream, &self.plain.group, &text]).await.unwrap();
        if row.get(0) {
            let sql = format!(
                "SELECT claimed FROM sqlstreams.consumer_group_cursor_{} WHERE group_id = {} ORDER BY generation DESC LIMIT 1",
                self.plain.stream, self.plain.group
            );
            self.sets.push((count(db, &sql).await, bindings));
        }
        db.batch_execute("COMMIT").await.unwrap();
    }

    async fn claim(&mut self) {
        let width = self.random.bool().then(|| self.random.i64(1..60));
        let limit = self.random.i64(1..12);
        let sql = "SELECT seq, token FROM sqlstreams.advance($1, $2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', $3, p_width => $4)";
        let row = self
            .plain
            .db
            .query_one(sql, &[&self.plain.stream, &self.plain.group, &limit, &width])
            .await
            .unwrap();
        if let Some(seq) = row.get(0) {
            let lease = Leased { seq, token: row.get(1), open: BTreeSet::new(), fetched_to: 0 };
            self.leases.push(lease);
        }
    }

    fn pick(&mut self) -> Option<usize> {
        (!self.leases.is_empty()).then(|| self.random.usize(0..self.leases.len()))
    }

    async fn fetch(&mut self) {
        let Some(i) = self.pick() else { return };
        let (token, after) = (self.leases[i].token, self.leases[i].fetched_to - 1);
        let limit = self.random.i64(1..8);
        let sql = "SELECT id, more FROM sqlstreams.fetch($1, $2, $3, $4, $5, 1000000, NULL::json)";
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
            [&self.plain.stream, &self.plain.group, &token, &after, &limit];
        let rows = self.plain.db.query(sql, &params).await.unwrap();
        for row in &rows {
            self.received(row.get(0));
            self.leases[i].open.insert(row.get(0));
        }
        let last = rows.last().filter(|row| row.get(1)).map(|row| row.get::<_, i64>(0));
        self.leases[i].fetched_to = last.map_or(i64::MAX, |last| last + 1);
    }

    /// Finishes some of what is open in a lease, as consumers do: what was fetched over and did not come is done, too.
    async fn settle(&mut self) {
        let Some(i) = self.pick() else { return };
        let lease = self.leases[i].clone();
        let share = self.random.u32(0..5);
        let done: BTreeSet<i64> =
            lease.open.iter().copied().filter(|_| self.random.u32(0..4) < share).collect();
        let open: Vec<String> =
            lease.open.difference(&done).map(|id| format!("[{id},{id}]")).collect();
        let sql = "SELECT sqlstreams.settle($1, $2, $3, $4, int8multirange(int8range(0, $5)) - $6::text::int8multirange)";
        let row = self
            .plain
            .db
            .query_one(
                sql,
                &[
                    &self.plain.stream,
                    &self.plain.group,
                    &lease.seq,
                    &lease.token,
                    &lease.fetched_to,
                    &format!("{{{}}}", open.join(",")),
                ],
            )
            .await
            .unwrap();
        if row.get(0) {
            self.handled.extend(&done);
            self.leases[i].open.retain(|id| !done.contains(id));
        }
        if !row.get::<_, bool>(0) || self.leases[i].open.is_empty() && lease.fetched_to == i64::MAX
        {
            self.leases.remove(i);
        }
    }

    async fn fail(&mut self) {
        let Some(i) = self.pick() else { return };
        let lease = self.leases[i].clone();
        let Some(id) = lease.open.first().copied() else { return };
        let sql =
            "SELECT sqlstreams.fail($1, $2, $3, $4, ARRAY[$5::bigint], '{retry}', '{no}', '{0}')";
        let row = self
            .plain
            .db
            .query_one(sql, &[&self.plain.stream, &self.plain.group, &lease.seq, &lease.token, &id])
            .await
            .unwrap();
        if row.get(0) {
            self.leases[i].open.remove(&id);
        } else {
            self.leases.remove(i);
        }
    }

    async fn release(&mut self) {
        let Some(i) = self.pick() else { return };
        let lease = self.leases.remove(i);
        let (db, stream, group) = (&self.plain.db, self.plain.stream, self.plain.group);
        if self.random.bool() {
            let sql =
                "SELECT sqlstreams.release($1, $2, ARRAY[$3::bigint], ARRAY[$4::uuid], '{\"{}\"}')";
            db.query(sql, &[&stream, &group, &lease.seq, &lease.token]).await.unwrap();
        } else {
            let from = self.random.i64(1..2 + self.sent.len() as i64);
            let sql = "SELECT sqlstreams.release_part($1, $2, $3, $4, int8multirange(int8range($5, NULL)))";
            db.query(sql, &[&stream, &group, &lease.seq, &lease.token, &from]).await.unwrap();
        }
    }

    async fn exceptions(&mut self) {
        let suspect = self.random.bool();
        let (token, ids) = self.plain.claim_exceptions(5, suspect).await;
        self.suspects += if suspect { ids.len() } else { 0 };
        for id in &ids {
            self.received(*id);
        }
        self.exceptions.extend(ids.iter().map(|id| (token, *id)));
        for (token, id) in std::mem::take(&mut self.exceptions) {
            let lost = self.plain.settle_exceptions(token, &[(id, "ok", None)]).await;
            if lost.is_empty() {
                self.handled.insert(id);
            }
        }
    }

    /// Runs everything to its end.
    async fn finish(&mut self) {
        self.leases.clear();
        let sql = format!("UPDATE {} SET expires_at = '-infinity'", self.plain.leases());
        self.plain.db.batch_execute(&sql).await.unwrap();
        let resolved = "SELECT sqlstreams.is_resolved($1, $2, sqlstreams.stream_head($1))";
        let (stream, group) = (self.plain.stream, self.plain.group);
        for _ in 0..100_000 {
            if self.plain.db.query_one(resolved, &[&stream, &group]).await.unwrap().get(0) {
                return;
            }
            self.claim().await;
            self.fetch().await;
            self.settle().await;
            self.exceptions().await;
        }
        panic!("it does not end");
    }
}

/// In any order of changes, claims, pages, settlements, failures, releases, losses and suspects.
#[tokio::test(flavor = "multi_thread")]
async fn each_id_is_judged_by_the_bindings_it_was_claimed_under() {
    let seed =
        std::env::var("SQLSTREAMS_SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    println!("SQLSTREAMS_SEED={seed}");
    let (mut changes, mut suspects) = (0, 0);
    for walk in 0..4 {
        let plain = installed(&database().await).await;
        plain
            .db
            .batch_execute("UPDATE sqlstreams.consumer_group SET max_reclaims = 1")
            .await
            .unwrap();
        let mut walk = Walk {
            plain,
            random: Rng::with_seed(seed.wrapping_add(walk)),
            sent: BTreeMap::new(),
            sets: Vec::new(),
            leases: Vec::new(),
            exceptions: Vec::new(),
            handled: BTreeSet::new(),
            suspects: 0,
        };
        for _ in 0..400 {
            walk.step().await;
        }
        walk.finish().await;
        let expected: BTreeSet<i64> =
            walk.sent.keys().copied().filter(|id| walk.is_for(*id)).collect();
        assert_eq!(walk.handled, expected, "seed {seed}");
        assert_eq!(
            count(&walk.plain.db, &format!("SELECT count(*) FROM {}", walk.plain.exceptions()))
                .await,
            0
        );
        // What the history says is what was seen beside each change.
        let sql = "SELECT after_id FROM sqlstreams.binding_history ORDER BY version";
        let rows = walk.plain.db.query(sql, &[]).await.unwrap();
        let told: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        assert_eq!(told, walk.sets.iter().map(|(after, _)| *after).collect::<Vec<_>>());
        changes += told.len();
        suspects += walk.suspects;
    }
    println!("{changes} changes, {suspects} suspects");
    assert!(changes > 40 && suspects > 0, "the walks say little: {changes}, {suspects}");
}

/// A range of ids that was claimed under other bindings keeps them, and a version lives as long as it is needed.
#[tokio::test(flavor = "multi_thread")]
async fn only_a_bounded_number_of_versions_is_kept() {
    let plain = installed(&database().await).await;
    let keyed = |key: &str| Sample { routing_key: Some(key.to_owned()), headers: None };
    let set = async |bindings: &str| {
        let sql = "SELECT sqlstreams.set_bindings($1, $2, $3::text::jsonb)";
        plain.db.query(sql, &[&plain.stream, &plain.group, &bindings]).await.unwrap();
    };
    let versions = "SELECT count(*) FROM sqlstreams.binding_set";
    set(r#"["a"]"#).await;
    let first = send(&plain, &[keyed("a"), keyed("b"), keyed("a")]).await;
    let sql = "SELECT token FROM sqlstreams.advance($1, $2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 2, p_width => 2)";
    let token: Uuid = plain.db.query_one(sql, &[&plain.stream, &plain.group]).await.unwrap().get(0);
    for n in 0..150 {
        set(&format!(r#"["b{n}"]"#)).await;
    }
    // The lease still needs the first.
    assert_eq!(count(&plain.db, versions).await, 151);
    assert_eq!(plain.try_fetch(token).await.unwrap(), [first[0]]);
    plain.db.batch_execute(&format!("DELETE FROM {}", plain.leases())).await.unwrap();
    set(r#"["a"]"#).await;
    assert_eq!(count(&plain.db, versions).await, 100);
    let oldest = "SELECT after_id FROM sqlstreams.binding_set ORDER BY version LIMIT 1";
    assert_eq!(count(&plain.db, oldest).await, 0);
    for n in 0..150 {
        set(&format!(r#"["c{n}"]"#)).await;
    }
    assert_eq!(count(&plain.db, versions).await, 100);
}

/// A claim puts what it does not need to a lease that ran out beside it. Whoever had that one comes late, and settles no more than it had.
#[tokio::test]
async fn what_is_put_to_a_lease_is_not_settled_by_who_had_it() {
    let plain = installed(&database().await).await;
    let set = "SELECT sqlstreams.set_bindings($1, $2, '[\"a\"]')";
    plain.db.query(set, &[&plain.stream, &plain.group]).await.unwrap();
    let sample = Sample { routing_key: Some("a".to_owned()), headers: None };
    let sent = send(&plain, &vec![sample; 20]).await;
    let claim = async |limit: i64, width: Option<i64>| -> (i64, Uuid) {
        let sql = "SELECT seq, token FROM sqlstreams.advance($1, $2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', $3, p_width => $4)";
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 4] =
            [&plain.stream, &plain.group, &limit, &width];
        let row = plain.db.query_one(sql, &params).await.unwrap();
        (row.get(0), row.get(1))
    };
    claim(10, Some(10)).await;
    let (seq, token) = claim(10, Some(10)).await;
    let expire = format!("UPDATE {} SET expires_at = now()", plain.leases());
    plain.db.batch_execute(&expire).await.unwrap();
    let (_, first) = claim(3, None).await;
    assert_eq!(plain.try_fetch(first).await.unwrap(), sent[..3]);
    let settle = "SELECT sqlstreams.settle($1, $2, $3, $4, '{[0,1000)}')";
    plain.db.query(settle, &[&plain.stream, &plain.group, &seq, &token]).await.unwrap();
    let (_, rest) = claim(20, Some(20)).await;
    assert_eq!(plain.try_fetch(rest).await.unwrap()[..7], sent[3..10]);
}
