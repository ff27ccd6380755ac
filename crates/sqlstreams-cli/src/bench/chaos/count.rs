//! Compares what was produced with what was done.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde::Serialize;
use sqlstreams::Group;

use super::business::Row;
use super::produce::key;

/// Dead letters read per call.
const PAGE: i64 = 1_000;

/// What became of the messages in a group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Count {
    pub(crate) group: String,
    /// Rows that handlers wrote.
    pub(crate) rows: u64,
    /// Of those, rows of handlers that failed afterwards, on purpose.
    pub(crate) failed: u64,
    /// Messages that were handled.
    pub(crate) handled: u64,
    /// Rows beyond one a message that was handled.
    pub(crate) repeated: u64,
    /// Dead letters.
    pub(crate) dead: u64,
    /// Acknowledged messages that are neither handled nor dead.
    pub(crate) lost: u64,
    /// Rows whose payload is not that of the message.
    pub(crate) altered: u64,
    /// The longest time between two rows.
    pub(crate) longest_pause_seconds: f64,
    /// Messages that a handler had while an earlier one of their key was neither handled nor dead.
    pub(crate) out_of_order: u64,
}

impl Count {
    /// `acknowledged`: payloads by id; `rows` in the order in which they were written.
    pub(crate) fn of(
        group: &str,
        acknowledged: &BTreeMap<i64, i64>,
        rows: &[Row],
        dead: &BTreeSet<i64>,
        keys: u32,
    ) -> Self {
        let mut handled = HashSet::new();
        let mut altered = 0;
        let done = rows.iter().filter(|row| !row.failed);
        let failed = rows.iter().filter(|row| row.failed).count();
        for row in done {
            // A message without a receipt may have any payload that was tried.
            let expected = acknowledged.get(&row.message_id);
            altered += u64::from(expected.is_some_and(|payload| *payload != row.payload));
            handled.insert(row.message_id);
        }
        let is_lost = |id: &&i64| !handled.contains(*id) && !dead.contains(*id);
        Self {
            group: group.to_owned(),
            rows: rows.len() as u64,
            failed: failed as u64,
            handled: handled.len() as u64,
            repeated: (rows.len() - failed - handled.len()) as u64,
            dead: dead.len() as u64,
            lost: acknowledged.keys().filter(is_lost).count() as u64,
            altered,
            longest_pause_seconds: rows
                .windows(2)
                .map(|two| two[1].at - two[0].at)
                .fold(0.0, f64::max),
            out_of_order: out_of_order(acknowledged, rows, dead, keys),
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

/// How many messages had their first row when an earlier message of their key had none yet of a handler that succeeded.
///
/// Later rows may go back behind others: whoever dies before it has said that it handled a message has it handled again.
fn out_of_order(
    acknowledged: &BTreeMap<i64, i64>,
    rows: &[Row],
    dead: &BTreeSet<i64>,
    keys: u32,
) -> u64 {
    // Messages without a receipt may be there as well.
    let unknown = rows.iter().map(|row| (row.message_id, row.payload));
    let messages: BTreeMap<i64, i64> =
        acknowledged.iter().map(|(id, payload)| (*id, *payload)).chain(unknown).collect();
    // Of each key what is not done, the lowest id last.
    let mut open = HashMap::<i64, Vec<i64>>::new();
    for (id, payload) in messages.iter().rev().filter(|(id, _)| !dead.contains(*id)) {
        open.entry(key(*payload, keys)).or_default().push(*id);
    }
    let (mut seen, mut done) = (HashSet::new(), HashSet::new());
    let mut wrong = 0;
    for row in rows {
        let open = open.entry(key(row.payload, keys)).or_default();
        let first = seen.insert(row.message_id);
        wrong += u64::from(first && open.last().is_some_and(|lowest| *lowest < row.message_id));
        if !row.failed {
            done.insert(row.message_id);
        }
        while open.last().is_some_and(|lowest| done.contains(lowest)) {
            open.pop();
        }
    }
    wrong
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

    fn row(message_id: i64) -> Row {
        Row { message_id, payload: message_id * 10, failed: false, at: 0.0 }
    }

    fn failed(message_id: i64) -> Row {
        Row { failed: true, ..row(message_id) }
    }

    fn count(rows: &[Row], dead: &[i64]) -> Count {
        let acknowledged = (1..=5).map(|id| (id, id * 10)).collect();
        Count::of("g", &acknowledged, rows, &dead.iter().copied().collect(), 1)
    }

    #[test]
    fn what_is_missing_is_lost_unless_it_is_dead() {
        let rows = [row(1), row(2), row(4), failed(5)];
        let found = count(&rows, &[3]);
        assert_eq!((found.handled, found.dead, found.lost, found.failed), (3, 1, 1, 1));
        assert!(!found.is_complete());
        assert!(count(&rows, &[3, 5]).is_exact());
    }

    #[test]
    fn what_comes_twice_is_repeated() {
        let rows = [row(1), failed(2), row(2), row(2), row(3), row(4), row(5), row(1)];
        let found = count(&rows, &[]);
        assert_eq!((found.rows, found.handled, found.repeated), (8, 5, 2));
        assert!(found.is_complete() && !found.is_exact());
    }

    #[test]
    fn what_comes_with_another_payload_is_noticed() {
        let mut rows = [1, 2, 3, 4, 5].map(row);
        (rows[2].payload, rows[3].at, rows[4].at) = (0, 1.5, 2.0);
        let found = count(&rows, &[]);
        assert_eq!((found.altered, found.lost, found.longest_pause_seconds), (1, 0, 1.5));
        assert!(!found.is_complete());
    }

    #[test]
    fn order_is_that_of_first_times() {
        let wrong = |rows: &[Row], dead: &[i64]| count(rows, dead).out_of_order;
        assert_eq!(wrong(&[1, 2, 3, 4, 5].map(row), &[]), 0);
        // Handled again it is not out of order, and what comes after what failed is.
        assert_eq!(wrong(&[row(1), row(2), row(1), row(3)], &[]), 0);
        assert_eq!(wrong(&[row(1), failed(2), row(2), row(3)], &[]), 0);
        assert_eq!(wrong(&[row(1), failed(2), row(3), row(2), row(4)], &[]), 1);
        assert_eq!(wrong(&[row(5), row(1), row(2)], &[]), 1);
        // Only a dead one is passed over.
        assert_eq!(wrong(&[row(1), row(3)], &[2]), 0);
        assert_eq!(wrong(&[row(1), row(3)], &[]), 1);
        // Other keys do not count.
        let acknowledged = (1..=5).map(|id| (id, id * 10 + id)).collect();
        let rows = [2, 4, 1, 3, 5].map(|id| Row { payload: id * 10 + id, ..row(id) });
        assert_eq!(Count::of("g", &acknowledged, &rows, &BTreeSet::new(), 2).out_of_order, 0);
        assert_eq!(Count::of("g", &acknowledged, &rows, &BTreeSet::new(), 1).out_of_order, 2);
    }
}
