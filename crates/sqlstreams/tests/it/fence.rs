//! The fence: whatever way and order transactions produce and end in, a group gets every committed message once.
//!
//! `SQLSTREAMS_FENCE_SECONDS` sets how long the stress runs (5), `SQLSTREAMS_FENCE_MAJOR` on which PostgreSQL (any);
//! `scripts/fence-stress` runs the long form on the oldest and on the newest.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::SinkExt;
use futures_util::future::join_all;
use sqlstreams_dev::Cluster;
use tokio_postgres::Client as Db;

use crate::plain::{Plain, create_group, installed};
use crate::support::{connect, count, database};

const PRODUCERS: u64 = 24;
const CLAIMERS_PER_GROUP: usize = 2;

/// The ways to produce that `pg_locks` shows differently, or that hide where the insert is.
pub const SETUP: &str = "
    CREATE TABLE business (id bigint GENERATED ALWAYS AS IDENTITY, message_id bigint);
    CREATE FUNCTION produce_by_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('\"trigger\"') RETURNING id INTO NEW.message_id;
        RETURN NEW;
    END $$;
    CREATE TRIGGER produce BEFORE INSERT ON business FOR EACH ROW EXECUTE FUNCTION produce_by_trigger();
    -- Returns NULL when the insert was undone by the exception block.
    CREATE FUNCTION produce_guarded(fail boolean) RETURNS bigint LANGUAGE plpgsql AS $$
    DECLARE
        made bigint;
    BEGIN
        BEGIN
            INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('\"guarded\"') RETURNING id INTO made;
            IF fail THEN RAISE 'no'; END IF;
        EXCEPTION WHEN raise_exception THEN
            made := NULL;
        END;
        PERFORM pg_sleep(random() * 0.004);
        RETURN made;
    END $$;";

#[derive(Debug, Default)]
struct Report {
    committed: BTreeSet<i64>,
    rolled_back: BTreeSet<i64>,
    /// How often each group got each id.
    delivered: Vec<BTreeMap<i64, u32>>,
    claimed: Vec<i64>,
    /// What a reader got that goes to the newest visible id, as people write it.
    unfenced: BTreeSet<i64>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_committed_message_once_and_a_reader_without_the_fence_loses_some() {
    let seconds = env::var("SQLSTREAMS_FENCE_SECONDS").map_or(5, |s| s.parse().unwrap());
    // Alive until the test ends.
    let mut own = None;
    let url = match env::var("SQLSTREAMS_FENCE_MAJOR") {
        Ok(major) => {
            let major = major.parse().unwrap();
            let start = move || Cluster::builder().major(major).durable(false).start().unwrap();
            let cluster = own.insert(tokio::task::spawn_blocking(start).await.unwrap());
            cluster.url("postgres")
        }
        Err(_) => database().await,
    };
    let report = stress(&url, Duration::from_secs(seconds)).await;

    let lost = report.committed.difference(&report.unfenced).count();
    println!(
        "{} committed, {} rolled back, {lost} lost without the fence",
        report.committed.len(),
        report.rolled_back.len()
    );
    for (group, delivered) in report.delivered.iter().enumerate() {
        let missing: Vec<_> =
            report.committed.iter().filter(|id| !delivered.contains_key(id)).collect();
        let repeated: Vec<_> = delivered.iter().filter(|(_, times)| **times > 1).collect();
        assert!(missing.is_empty(), "group {group} missed {} messages: {missing:?}", missing.len());
        assert!(repeated.is_empty(), "group {group} got messages again: {repeated:?}");
        let ghosts: Vec<_> =
            delivered.keys().filter(|id| report.rolled_back.contains(id)).collect();
        assert!(ghosts.is_empty(), "group {group} got what was rolled back: {ghosts:?}");
        let unknown = delivered.keys().filter(|id| !report.committed.contains(id)).count();
        assert_eq!(unknown, 0, "group {group} got what nobody committed");
        assert!(report.claimed[group] >= *report.committed.last().unwrap());
    }
    assert!(report.committed.len() > 500 && report.rolled_back.len() > 50, "too little happened");
    // The test of the test: the producers' order of commits does lose messages where nothing guards against it.
    assert!(lost > 0, "a reader without the fence lost nothing, so this run shows nothing");
}

async fn stress(url: &str, time: Duration) -> Report {
    let setup = installed(url).await;
    let groups = vec![setup.group, create_group(&setup.db, setup.stream, "h").await];
    setup.db.batch_execute(SETUP).await.unwrap();
    // Connections first: many at once take a while to be made.
    let mut producers = Vec::new();
    for number in 0..PRODUCERS {
        producers.push(Producer::new(connect(url).await, number));
    }
    let mut claimers = Vec::new();
    for &group in groups.iter().flat_map(|group| [group; CLAIMERS_PER_GROUP]) {
        claimers.push(Plain { db: connect(url).await, stream: setup.stream, group });
    }
    let (reader, locker) = (connect(url).await, connect(url).await);

    let end = Instant::now() + time;
    let produced = Arc::new(AtomicBool::new(false));
    let unfenced = tokio::spawn(read_unfenced(reader, produced.clone()));
    let claimers: Vec<_> = claimers
        .into_iter()
        .map(|plain| (plain.group, tokio::spawn(claim_all(plain, produced.clone()))))
        .collect();
    let locker = tokio::spawn(lock_now_and_then(locker, end));
    let producers = join_all(producers.into_iter().map(|p| tokio::spawn(p.run(end)))).await;
    locker.await.unwrap();
    produced.store(true, Ordering::SeqCst);

    let mut report = Report { unfenced: unfenced.await.unwrap(), ..Report::default() };
    for producer in producers {
        let producer = producer.unwrap();
        report.committed.extend(producer.committed);
        report.rolled_back.extend(producer.rolled_back);
    }
    let mut claimed = Vec::new();
    for (group, claimer) in claimers {
        claimed.push((group, claimer.await.unwrap()));
    }
    for &group in &groups {
        let mut delivered = BTreeMap::new();
        for id in claimed.iter().filter(|c| c.0 == group).flat_map(|c| &c.1) {
            *delivered.entry(*id).or_default() += 1;
        }
        report.delivered.push(delivered);
        let plain = Plain { db: connect(url).await, stream: setup.stream, group };
        report.claimed.push(plain.claimed().await);
    }
    // What the producers believe is what the log holds.
    assert_eq!(
        count(&setup.db, &format!("SELECT count(*) FROM {}", setup.log())).await,
        report.committed.len() as i64
    );
    report
}

/// One connection that produces in every way there is.
pub struct Producer {
    db: Db,
    number: u64,
    pub random: fastrand::Rng,
    pub committed: Vec<i64>,
    pub rolled_back: Vec<i64>,
}

const INSERT: &str = "INSERT INTO sqlstreams.message_log_1 (payload) VALUES ('1') RETURNING id";
const INSERT_THREE: &str = "INSERT INTO sqlstreams.message_log_1 (payload) SELECT '3' FROM generate_series(1, 3) RETURNING id";
const BY_TRIGGER: &str = "INSERT INTO business DEFAULT VALUES RETURNING message_id";

impl Producer {
    pub fn new(db: Db, number: u64) -> Self {
        Self {
            db,
            number,
            random: fastrand::Rng::with_seed(number),
            committed: Vec::new(),
            rolled_back: Vec::new(),
        }
    }

    async fn run(mut self, end: Instant) -> Self {
        while Instant::now() < end {
            self.produce().await.unwrap();
        }
        self
    }

    /// One transaction, or a few rows of autocommit.
    pub async fn produce(&mut self) -> Result<(), tokio_postgres::Error> {
        match self.random.u32(0..11) {
            0 => {
                let ids = self.ids(INSERT).await?;
                self.committed.extend(ids);
            }
            1 => {
                let ids = self.ids(BY_TRIGGER).await?;
                self.committed.extend(ids);
            }
            2 => {
                let fail = self.random.bool();
                let made: Option<i64> =
                    self.db.query_one("SELECT produce_guarded($1)", &[&fail]).await?.get(0);
                self.committed.extend(made);
            }
            3 => self.with_savepoints().await?,
            4 => self.prepared().await?,
            5 => self.transaction("REPEATABLE READ", INSERT, 15).await?,
            6 => self.transaction("SERIALIZABLE", INSERT, 10).await?,
            7 => self.copied().await?,
            8 => self.merged().await?,
            9 => self.transaction("READ COMMITTED", INSERT, 30).await?,
            _ => self.transaction("READ COMMITTED", BY_TRIGGER, 10).await?,
        }
        self.pause(4).await;
        Ok(())
    }

    async fn transaction(
        &mut self,
        isolation: &str,
        first: &str,
        ms: u64,
    ) -> Result<(), tokio_postgres::Error> {
        self.db.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}")).await?;
        let mut ids = self.ids(first).await?;
        self.pause(ms).await;
        ids.extend(self.ids(INSERT_THREE).await?);
        self.end(ids).await
    }

    async fn with_savepoints(&mut self) -> Result<(), tokio_postgres::Error> {
        self.db.batch_execute("BEGIN; SAVEPOINT a").await?;
        let undone = self.ids(INSERT).await?;
        self.rolled_back.extend(undone);
        self.db.batch_execute("ROLLBACK TO a").await?;
        // The lock went with the savepoint, and the transaction goes on.
        self.pause(15).await;
        let mut ids = self.ids(INSERT).await?;
        self.db.batch_execute("SAVEPOINT b").await?;
        ids.extend(self.ids(INSERT).await?);
        self.db.batch_execute("RELEASE b; SAVEPOINT c").await?;
        let undone = self.ids(INSERT).await?;
        self.rolled_back.extend(undone);
        self.pause(15).await;
        self.db.batch_execute("ROLLBACK TO c").await?;
        self.end(ids).await
    }

    async fn prepared(&mut self) -> Result<(), tokio_postgres::Error> {
        let (ids, name) = self.prepare().await?;
        self.pause(20).await;
        self.end_prepared(ids, &name).await
    }

    /// A transaction that is left prepared: its ids and its name.
    pub async fn prepare(&mut self) -> Result<(Vec<i64>, String), tokio_postgres::Error> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("fence {} {}", self.number, COUNT.fetch_add(1, Ordering::Relaxed));
        self.db.batch_execute("BEGIN").await?;
        let ids = self.ids(INSERT_THREE).await?;
        self.db.batch_execute(&format!("PREPARE TRANSACTION '{name}'")).await?;
        Ok((ids, name))
    }

    pub async fn end_prepared(
        &mut self,
        ids: Vec<i64>,
        name: &str,
    ) -> Result<(), tokio_postgres::Error> {
        let (word, log) = match self.random.u32(0..10) {
            0..2 => ("ROLLBACK", &mut self.rolled_back),
            _ => ("COMMIT", &mut self.committed),
        };
        self.db.batch_execute(&format!("{word} PREPARED '{name}'")).await?;
        log.extend(ids);
        Ok(())
    }

    async fn copied(&mut self) -> Result<(), tokio_postgres::Error> {
        let key = format!("copy {} {}", self.number, self.random.u64(..));
        self.db.batch_execute("BEGIN").await?;
        let copy = "COPY sqlstreams.message_log_1 (key, payload) FROM STDIN";
        let mut sink = pin!(self.db.copy_in(copy).await?);
        sink.send(Bytes::from(format!("{key}\t1\n{key}\t2\n"))).await?;
        self.pause(5).await;
        sink.finish().await?;
        let ids = self.by_key(&key).await?;
        self.end(ids).await
    }

    async fn merged(&mut self) -> Result<(), tokio_postgres::Error> {
        let key = format!("merge {} {}", self.number, self.random.u64(..));
        self.db.batch_execute("BEGIN").await?;
        self.db
            .batch_execute(&format!(
                "MERGE INTO sqlstreams.message_log_1 AS t USING (SELECT 1) AS s ON false
                 WHEN NOT MATCHED THEN INSERT (key, payload) VALUES ('{key}', '1')"
            ))
            .await?;
        self.pause(5).await;
        let ids = self.by_key(&key).await?;
        self.end(ids).await
    }

    /// Commits, or one time in ten rolls back; only then are the ids sorted in.
    async fn end(&mut self, ids: Vec<i64>) -> Result<(), tokio_postgres::Error> {
        let (word, log) = match self.random.u32(0..10) {
            0 => ("ROLLBACK", &mut self.rolled_back),
            _ => ("COMMIT", &mut self.committed),
        };
        self.db.batch_execute(word).await?;
        log.extend(ids);
        Ok(())
    }

    async fn by_key(&self, key: &str) -> Result<Vec<i64>, tokio_postgres::Error> {
        // Bounded: there is no index on keys.
        let sql = format!(
            "SELECT id FROM sqlstreams.message_log_1 WHERE key = '{key}' AND id > (SELECT last_value - 5000 FROM sqlstreams.message_log_1_id_seq)"
        );
        self.ids(&sql).await
    }

    async fn ids(&self, sql: &str) -> Result<Vec<i64>, tokio_postgres::Error> {
        Ok(self.db.query(sql, &[]).await?.iter().map(|row| row.get(0)).collect())
    }

    async fn pause(&mut self, ms: u64) {
        tokio::time::sleep(Duration::from_micros(self.random.u64(0..ms * 1000))).await;
    }
}

/// Claims and settles until everything that was produced is claimed; returns what it got.
async fn claim_all(plain: Plain, produced: Arc<AtomicBool>) -> Vec<i64> {
    let mut random = fastrand::Rng::with_seed(plain.group as u64);
    let mut got = Vec::new();
    let mut held = None;
    let mut deadline = None;
    loop {
        let done = produced.load(Ordering::SeqCst);
        let finished: Vec<_> = held.iter().map(|lease| (lease, "{[1,)}")).collect();
        let (lost, lease) = plain.advance(&finished, random.i64(1..400)).await;
        assert!(lost.is_empty(), "a lease was lost in the middle of its duration");
        held = lease;
        match &held {
            Some(lease) => got.extend(plain.fetch(lease).await),
            None if done => {
                let head = count(&plain.db, "SELECT sqlstreams.stream_head(1)").await;
                if plain.claimed().await >= head {
                    return got;
                }
                let deadline = *deadline.get_or_insert(Instant::now() + Duration::from_secs(30));
                assert!(Instant::now() < deadline, "the group never reaches the end of the log");
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            None => {
                // More looks at the lock table than its cost would allow, at more awkward moments.
                plain.let_look().await;
                tokio::time::sleep(Duration::from_micros(random.u64(0..2000))).await;
            }
        }
    }
}

/// Goes to the newest visible id each time.
async fn read_unfenced(db: Db, produced: Arc<AtomicBool>) -> BTreeSet<i64> {
    let (mut seen, mut position) = (BTreeSet::new(), 0_i64);
    loop {
        let done = produced.load(Ordering::SeqCst);
        let rows = db
            .query(
                "SELECT id FROM sqlstreams.message_log_1 WHERE id > $1 ORDER BY id LIMIT 500",
                &[&position],
            )
            .await
            .unwrap();
        seen.extend(rows.iter().map(|row| row.get::<_, i64>(0)));
        match seen.last() {
            Some(last) if !rows.is_empty() => position = *last,
            _ if done => return seen,
            _ => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}

/// A SHARE lock, as CREATE INDEX takes it: producers queue up behind it, and locks move out of the fast path.
async fn lock_now_and_then(db: Db, end: Instant) {
    db.batch_execute("SET lock_timeout = '50ms'").await.unwrap();
    while Instant::now() < end {
        let locked =
            db.batch_execute("BEGIN; LOCK TABLE sqlstreams.message_log_1 IN SHARE MODE").await;
        db.batch_execute(if locked.is_ok() { "COMMIT" } else { "ROLLBACK" }).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
