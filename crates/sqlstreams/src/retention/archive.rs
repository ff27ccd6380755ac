//! Dead letters that have been kept for long enough, and archived messages that nothing refers to any more: a step of the upkeep of one stream.

use std::time::{Duration, Instant, SystemTime};

use serde_json::{Map, Value};
use tokio_postgres::types::ToSql;

use crate::client::Client;
use crate::error::Result;

/// How long a step takes at the most, about.
const BUDGET: Duration = Duration::from_secs(1);
/// So many dead letters go in one transaction.
const CHUNK: i64 = 1_000;
/// How often the archive is looked through, and dead letters are looked for.
const SOONEST: Duration = Duration::from_secs(10);
const LATEST: Duration = Duration::from_secs(600);

/// What a step came to.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    pub(crate) dead_letters: u64,
    /// There is more to do at once.
    pub(crate) more: bool,
    /// When to come again.
    pub(crate) next: Duration,
}

/// Where it goes on, if it was not done.
#[derive(Debug, Default)]
pub(crate) struct Place {
    /// The archive has been looked through up to this id.
    archive: i64,
    /// Dead letters that died before are gone, or somebody has them in hand.
    dead: Option<SystemTime>,
}

impl Place {
    pub(crate) fn from_memory(memory: &Map<String, Value>) -> Self {
        let number = |name: &str| memory.get(name).and_then(Value::as_i64);
        let dead = number("dead_micros").and_then(|micros| u64::try_from(micros).ok());
        Self {
            archive: number("archive").unwrap_or_default(),
            dead: dead.map(|micros| SystemTime::UNIX_EPOCH + Duration::from_micros(micros)),
        }
    }

    pub(crate) fn to_memory(&self) -> Map<String, Value> {
        let mut memory = Map::new();
        if self.archive > 0 {
            memory.insert("archive".to_owned(), self.archive.into());
        }
        let dead = self.dead.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        if let Some(micros) = dead.and_then(|dead| i64::try_from(dead.as_micros()).ok()) {
            memory.insert("dead_micros".to_owned(), micros.into());
        }
        memory
    }
}

pub(crate) async fn tidy(client: &Client, stream: i64, place: &mut Place) -> Result<Ended> {
    let queries = &client.inner.queries;
    let doing = "let old dead letters go";
    let deadline = Instant::now() + BUDGET;
    let mut ended = Ended { next: LATEST, ..Ended::default() };
    loop {
        let params: [&(dyn ToSql + Sync); 3] = [&stream, &place.dead, &CHUNK];
        let row = client.query_one(&queries.expire_dead_letters, &params, doing).await?;
        let removed: i64 = row.get(0);
        ended.dead_letters += removed.unsigned_abs();
        if removed < CHUNK {
            if let Some(due) = row.get::<_, Option<f64>>(2) {
                let due = Duration::try_from_secs_f64(due).unwrap_or_default();
                ended.next = due.clamp(SOONEST, LATEST);
            }
            break;
        }
        place.dead = Some(row.get(1));
        if Instant::now() >= deadline {
            return Ok(Ended { more: true, next: Duration::ZERO, ..ended });
        }
    }
    loop {
        let row =
            client.query_one(&queries.tidy_archive, &[&stream, &place.archive], doing).await?;
        match row.get(1) {
            None => break,
            Some(upto) => place.archive = upto,
        }
        if Instant::now() >= deadline {
            return Ok(Ended { more: true, next: Duration::ZERO, ..ended });
        }
    }
    // Once in a while from the beginning: what somebody had in hand was passed over.
    *place = Place::default();
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_remembered() {
        let dead = SystemTime::UNIX_EPOCH + Duration::from_micros(1_700_000_000_123_456);
        let place = Place { archive: 17, dead: Some(dead) };
        let again = Place::from_memory(&place.to_memory());
        assert_eq!((again.archive, again.dead), (17, Some(dead)));
        assert!(Place::default().to_memory().is_empty());
    }
}
