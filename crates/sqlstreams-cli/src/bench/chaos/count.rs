//! Compares what was produced with what was done.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde::Serialize;
use sqlstreams::Group;

use super::business::Row;

/// Dead letters read per call.
const PAGE: i64 = 1_000;

/// What became of the messages in a group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Count {
    pub(crate) group: String,
    /// Rows that handlers wrote.
    pub(crate) rows: u64,
    /// Messages among those.
    pub(crate) handled: u64,
    /// Rows beyond one a message.
    pub(crate) repeated: u64,
    /// Dead letters.
    pub(crate) dead: u64,
    /// Acknowledged messages that are neither handled nor dead.
    pub(crate) lost: u64,
    /// Rows whose payload is not that of the message.
    pub(crate) altered: u64,
    /// The longest time between two rows.
    pub(crate) longest_pause_seconds: f64,
}

impl Count {
    /// `acknowledged`: payloads by id; `rows` in the order in which they were written.
    pub(crate) fn of(
        group: &str,
        acknowledged: &BTreeMap<i64, i64>,
        rows: &[Row],
        dead: &BTreeSet<i64>,
    ) -> Self {
        let mut handled = BTreeSet::new();
        let mut altered = 0;
        for row in rows {
            // A message without a receipt may have any payload that was tried.
            let expected = acknowledged.get(&row.message_id);
            altered += u64::from(expected.is_some_and(|payload| *payload != row.payload));
            handled.insert(row.message_id);
        }
        let is_lost = |id: &&i64| !handled.contains(*id) && !dead.contains(*id);
        Self {
            group: group.to_owned(),
            rows: rows.len() as u64,
            handled: handled.len() as u64,
            repeated: (rows.len() - handled.len()) as u64,
            dead: dead.len() as u64,
            lost: acknowledged.keys().filter(is_lost).count() as u64,
            altered,
            longest_pause_seconds: rows
                .windows(2)
                .map(|two| two[1].at - two[0].at)
                .fold(0.0, f64::max),
        }
    }

    /// Nothing is lost, and nothing was changed.
    pub(crate) fn is_complete(&self) -> bool {
        self.lost == 0 && self.altered == 0
    }

    /// And nothing was done twice.
    pub(crate) fn is_exact(&self) -> bool {
        self.is_complete() && self.repeated == 0
    }
}

/// How many messages had their first row after one with a higher id from the same process.
///
/// That happens to messages which their process took over from another, so it is no failure by itself.
pub(crate) fn late(rows: &[Row]) -> u64 {
    let mut handled = HashSet::new();
    let mut highest = HashMap::<&str, i64>::new();
    let mut late = 0;
    for row in rows.iter().filter(|row| handled.insert(row.message_id)) {
        let highest = highest.entry(&row.worker).or_insert(row.message_id);
        late += u64::from(row.message_id < *highest);
        *highest = row.message_id.max(*highest);
    }
    late
}

/// The ids of a group's dead letters.
pub(crate) async fn dead_letters(group: &Group<i64>) -> sqlstreams::Result<BTreeSet<i64>> {
    let mut ids = BTreeSet::new();
    loop {
        let after = ids.last().copied().unwrap_or_default();
        let page = group.dead_letters(after, PAGE).await?;
        if page.is_empty() {
            return Ok(ids);
        }
        ids.extend(page.iter().map(|letter| letter.message_id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(message_id: i64, worker: &str) -> Row {
        Row { message_id, payload: message_id * 10, worker: worker.to_owned(), at: 0.0 }
    }

    fn count(rows: &[Row], dead: &[i64]) -> Count {
        let acknowledged = (1..=5).map(|id| (id, id * 10)).collect();
        Count::of("g", &acknowledged, rows, &dead.iter().copied().collect())
    }

    #[test]
    fn what_is_missing_is_lost_unless_it_is_dead() {
        let rows = [row(1, "a"), row(2, "a"), row(4, "a")];
        let found = count(&rows, &[3]);
        assert_eq!((found.handled, found.dead, found.lost), (3, 1, 1));
        assert!(!found.is_complete());
        assert!(count(&rows, &[3, 5]).is_exact());
    }

    #[test]
    fn what_comes_twice_is_repeated() {
        let found = count(&[1, 2, 2, 3, 4, 5, 1].map(|id| row(id, "a")), &[]);
        assert_eq!((found.rows, found.handled, found.repeated), (7, 5, 2));
        assert!(found.is_complete() && !found.is_exact());
    }

    #[test]
    fn what_comes_with_another_payload_or_late_is_noticed() {
        let mut rows = [1, 2, 3, 4, 5].map(|id| row(id, "a"));
        (rows[2].payload, rows[3].at, rows[4].at) = (0, 1.5, 2.0);
        let found = count(&rows, &[]);
        assert_eq!((found.altered, found.lost, found.longest_pause_seconds), (1, 0, 1.5));
        assert!(!found.is_complete());
    }

    #[test]
    fn lateness_is_within_a_worker() {
        let rows = [row(4, "a"), row(1, "b"), row(3, "a"), row(2, "b"), row(5, "a")];
        assert_eq!(late(&rows), 1);
        // Nor is a repetition late: the message was handled before.
        assert_eq!(late(&[row(1, "a"), row(2, "a"), row(1, "a")]), 0);
    }
}
