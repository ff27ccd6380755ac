//! Delayed messages go into the log when they are due. Every process that consumes a stream sees to it: it knows from the looks
//! of the watcher's task when the next one is due, sleeps until then and moves what there is, in transactions of their own.
//!
//! Of several processes one is at it while it finds something to move, since the others come a moment later, to see whether
//! it is done.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio_postgres::types::ToSql;

use super::bell::Bell;
use crate::client::{BEGIN, Client, answered, transact};
use crate::error::{Error, ErrorKind, Result};
use crate::partitions;

/// So many messages go in one transaction.
const MOST: i64 = 2_000;
/// How long one transaction may take.
const LIMIT: Duration = Duration::from_secs(60);
/// By how much whoever did not move the last ones lets the other go first, in milliseconds.
const OTHERS_FIRST: std::ops::Range<u64> = 60..180;
/// The pause after a failure, and where partitions cannot be made.
const TROUBLE: Duration = Duration::from_secs(1);
/// How often messages are looked for without a lower bound.
const UNBOUNDED: Duration = Duration::from_secs(5);
/// What was due so long ago has been moved, but for transactions that were open for longer. Those are found by looks without
/// a lower bound.
const MARGIN: Duration = Duration::from_secs(1);

/// What a process knows of the delayed messages of the streams it consumes.
#[derive(Debug, Default)]
pub(super) struct Delayed(Mutex<BTreeMap<i64, Waiting>>);

#[derive(Debug)]
struct Waiting {
    /// When to move; `None`: nothing waits, as far as is known, or a look is to tell.
    due: Option<Instant>,
    from: From,
    /// A task is moving.
    moving: bool,
    /// We have moved the last ones.
    first: bool,
    /// Somebody has sent some that are due soon.
    rung: bool,
}

/// The lower bound for looks: below it dead rows lie, perhaps, that nobody can remove yet.
#[derive(Debug)]
struct From {
    bound: Option<SystemTime>,
    unbounded_at: Instant,
    /// A look without it is to be followed by a move without.
    without: bool,
}

/// Moves what is overdue now, or waits for others to do so: for whoever wants all that there is.
pub(crate) async fn move_overdue(client: &Client, stream: i64) -> Result<()> {
    let (mut from, mut begun, mut room) = ((None, 0), None, 0);
    loop {
        let moved = move_some(client, stream, from).await?;
        let begun = *begun.get_or_insert(moved.looked_at);
        if moved.no_room {
            room += 1;
            if room > 100 {
                let text = "partitions are used up as fast as they are made";
                return Err(Error::new(ErrorKind::Database, text));
            }
            partitions::make_few(client, stream, None).await?;
        } else if moved.busy {
            tokio::time::sleep(Duration::from_millis(OTHERS_FIRST.start)).await;
        } else if moved.next.is_none_or(|next| next > 0) {
            return Ok(());
        }
        if let Some((at, id)) = moved.upto {
            if at > begun {
                return Ok(());
            }
            from = (Some(at), id);
        }
    }
}

/// What came of one transaction.
struct Moved {
    count: i64,
    upto: Option<(SystemTime, i64)>,
    looked_at: SystemTime,
    /// Below zero for what is overdue.
    next: Option<i64>,
    busy: bool,
    no_room: bool,
}

impl Delayed {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<i64, Waiting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the streams that nobody consumes any more.
    pub(super) fn keep(&self, streams: &BTreeSet<i64>) {
        self.lock().retain(|stream, waiting| waiting.moving || streams.contains(stream));
    }

    /// Somebody has sent messages to the stream that are due soon.
    pub(super) fn ring(&self, stream: i64) {
        self.lock().entry(stream).or_default().rung = true;
    }

    /// Of these streams, and of those that were rung for, the ones to look at, with their lower bounds.
    pub(super) fn to_look_at(&self, looked: &BTreeSet<i64>) -> (Vec<i64>, Vec<Option<SystemTime>>) {
        let mut streams = self.lock();
        for stream in looked {
            streams.entry(*stream).or_default();
        }
        let mut look = |(stream, waiting): (&i64, &mut Waiting)| {
            if waiting.moving {
                return None;
            }
            let rung = std::mem::take(&mut waiting.rung);
            (rung || looked.contains(stream)).then(|| (*stream, waiting.from.of_look()))
        };
        streams.iter_mut().filter_map(&mut look).unzip()
    }

    /// A look says when the next one of the stream is due, in milliseconds; `None`: there is none.
    pub(super) fn seen(&self, stream: i64, due_in: Option<i64>) {
        if let Some(waiting) = self.lock().get_mut(&stream).filter(|waiting| !waiting.moving) {
            let due = due_in.map(|due_in| waiting.when(due_in));
            // What is overdue waits for the moment that was set for it.
            waiting.due = match (waiting.due, due) {
                (Some(set), Some(due)) => Some(set.min(due)),
                (_, due) => due,
            };
        }
    }

    /// When something is to be moved next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.lock().values().filter_map(|waiting| waiting.due).min()
    }

    /// Whether it is to be looked for what was sent.
    pub(super) fn is_rung(&self) -> bool {
        self.lock().values().any(|waiting| waiting.rung && !waiting.moving)
    }

    /// Starts to move what is due.
    pub(super) fn move_due(client: &Client) {
        let now = Instant::now();
        let mut streams = client.inner.watcher.delayed.lock();
        for (stream, waiting) in streams.iter_mut() {
            if waiting.due.is_some_and(|due| due <= now) && !waiting.moving {
                (waiting.moving, waiting.due) = (true, None);
                let moving = Moving { client: client.clone(), stream: *stream };
                let from = waiting.from.of_move();
                client.inner.background.handle().spawn(moving.run(from));
            }
        }
    }
}

impl Default for Waiting {
    fn default() -> Self {
        let from = From { bound: None, unbounded_at: Instant::now(), without: true };
        Self { due: None, from, moving: false, first: false, rung: false }
    }
}

impl From {
    fn of_look(&mut self) -> Option<SystemTime> {
        if self.unbounded_at.elapsed() >= UNBOUNDED {
            (self.unbounded_at, self.without) = (Instant::now(), true);
        }
        if self.without { None } else { self.bound }
    }

    fn of_move(&mut self) -> Option<SystemTime> {
        if std::mem::take(&mut self.without) { None } else { self.bound }
    }
}

impl Waiting {
    /// When to move what is due in so many milliseconds.
    fn when(&self, due_in: i64) -> Instant {
        let due_in = Duration::from_millis(u64::try_from(due_in).map_or(0, |ms| ms + 1));
        let others = match self.first {
            true => Duration::ZERO,
            false => Duration::from_millis(fastrand::u64(OTHERS_FIRST)),
        };
        // Beyond what a clock can say there are looks enough before.
        let now = Instant::now();
        now.checked_add(due_in + others).unwrap_or(now + Duration::from_secs(24 * 3600))
    }
}

/// The task that moves the messages of one stream. However it ends, another may begin.
struct Moving {
    client: Client,
    stream: i64,
}

impl Drop for Moving {
    fn drop(&mut self) {
        let watcher = &self.client.inner.watcher;
        if let Some(waiting) = watcher.delayed.lock().get_mut(&self.stream) {
            waiting.moving = false;
        }
        watcher.rung.news.notify_one();
    }
}

impl Moving {
    async fn run(self, from: Option<SystemTime>) {
        let due = match self.move_all(from).await {
            Ok(due) => due,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(
                    stream = self.stream,
                    error,
                    "could not move delayed messages into the log"
                );
                Some(Instant::now() + TROUBLE)
            }
        };
        if let Some(waiting) = self.client.inner.watcher.delayed.lock().get_mut(&self.stream) {
            waiting.due = due;
        }
    }

    /// Moves what is due, and returns when to come again.
    async fn move_all(&self, from: Option<SystemTime>) -> Result<Option<Instant>> {
        let mut from = (from, 0);
        let (mut any, mut room) = (false, 0);
        loop {
            let moved = match move_some(&self.client, self.stream, from).await {
                // Others use up the partitions as well.
                Err(error) if error.is_out_of_partitions() && room < 3 => None,
                moved => Some(moved?),
            };
            let Some(moved) = moved.filter(|moved| !moved.no_room) else {
                room += 1;
                partitions::make_few(&self.client, self.stream, None).await?;
                if room > 3 {
                    return Ok(Some(Instant::now() + TROUBLE));
                }
                continue;
            };
            any |= moved.count > 0;
            if let Some((at, id)) = moved.upto {
                from = (Some(at), id);
            }
            if moved.count > 0 && moved.next.is_some_and(|next| next <= 0) {
                continue;
            }
            let mut streams = self.client.inner.watcher.delayed.lock();
            let Some(waiting) = streams.get_mut(&self.stream) else { return Ok(None) };
            waiting.first = any && !moved.busy;
            if moved.busy {
                // The next look tells whether it is still there.
                return Ok(None);
            }
            waiting.from.bound = moved.looked_at.checked_sub(MARGIN);
            return Ok(moved.next.map(|next| waiting.when(next)));
        }
    }
}

async fn move_some(client: &Client, stream: i64, from: (Option<SystemTime>, i64)) -> Result<Moved> {
    let doing = "move delayed messages";
    let connection = client.connection(doing).await?;
    let params: [&(dyn ToSql + Sync); 4] = [&stream, &from.0, &from.1, &MOST];
    let query = &client.inner.queries.move_delayed;
    let answer = answered(LIMIT, transact(&connection, BEGIN, query, &params), doing).await;
    let rows = client.keep(connection, answer)?;
    let row = rows
        .first()
        .ok_or_else(|| Error::new(ErrorKind::Database, "no answer from move_delayed"))?;
    let count = row.get(0);
    if count > 0 {
        client.inner.watcher.rang(stream);
        Bell::ring(client, stream);
    }
    Ok(Moved {
        count,
        upto: row.get::<_, Option<SystemTime>>(1).zip(row.get(2)),
        looked_at: row.get(3),
        next: row.get(4),
        busy: row.get(5),
        no_room: row.get(6),
    })
}
