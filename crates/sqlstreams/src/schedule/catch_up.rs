//! What is to be produced when somebody looks at a schedule: its times since it was looked at last.

use std::collections::VecDeque;
use std::str::FromStr;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::timetable::Timetable;
use crate::error::{Error, ErrorKind, Result};

/// So many messages that are in time go in one transaction.
const MOST: usize = 500;
/// Missed times are counted up to this.
const MOST_COUNTED: u64 = 100_000;

/// What becomes of a schedule's times at which nobody was there to produce its message: the database was down, or no process
/// did the [upkeep](crate::Client) of the installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Missed {
    /// Nothing.
    Skip,
    /// However many they are, one message, for the latest of them. The default.
    #[default]
    Once,
    /// A message for each, but not for more than the latest [`catch_up`](crate::ScheduleBuilder::catch_up).
    All,
}

impl Missed {
    /// Its name, as in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::Once => "once",
            Self::All => "all",
        }
    }
}

impl FromStr for Missed {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "skip" => Ok(Self::Skip),
            "once" => Ok(Self::Once),
            "all" => Ok(Self::All),
            other => {
                let text = format!("times that were missed are not made up for as {other:?}");
                Err(Error::new(ErrorKind::InvalidArgument, text)
                    .with_hint("Choose skip, once or all."))
            }
        }
    }
}

/// How a schedule deals with what was missed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Policy {
    pub(super) missed: Missed,
    /// Later than this is missed.
    pub(super) grace: Duration,
    pub(super) catch_up: usize,
}

/// What `fire_schedule` is to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// What messages are produced for, in order.
    pub(super) times: Vec<Timestamp>,
    /// So many of them, the first, were missed.
    pub(super) late: usize,
    /// For so many there is no message.
    pub(super) missed: u64,
    pub(super) missed_at: Option<Timestamp>,
    /// Up to here all times are done with then.
    pub(super) until: Timestamp,
    pub(super) next: Option<Timestamp>,
}

/// What is to be done now with the times after `done`.
pub(super) fn plan(table: &Timetable, policy: Policy, done: Timestamp, now: Timestamp) -> Plan {
    let grace = SignedDuration::try_from(policy.grace).unwrap_or(SignedDuration::MAX);
    // From here on a time is in time.
    let in_time = now.checked_sub(grace).unwrap_or(Timestamp::MIN);
    let keep = match policy.missed {
        Missed::Skip => 0,
        Missed::Once => 1,
        Missed::All => policy.catch_up,
    };
    let (mut count, mut kept, mut at) = (0_u64, VecDeque::new(), done);
    let mut missed_at = None;
    while let Some(time) = table.next(at).filter(|time| *time < in_time) {
        (at, missed_at) = (time, Some(time));
        push(&mut kept, time, keep);
        count += 1;
        if count == MOST_COUNTED {
            // Nobody wants to know more exactly. The latest are those before in_time all the same.
            kept = latest(table, at, in_time, keep.max(1));
            at = kept.back().copied().unwrap_or(at);
            missed_at = Some(at);
            kept.truncate(if keep == 0 { 0 } else { kept.len() });
            break;
        }
    }
    let mut times: Vec<Timestamp> = kept.into();
    let late = times.len();
    let missed = count - late as u64;
    let (mut until, mut next) = (now, None);
    while let Some(time) = table.next(at) {
        if time > now {
            next = Some(time);
            break;
        }
        if times.len() == late + MOST {
            // The rest follows.
            (until, next) = (at, Some(time));
            break;
        }
        times.push(time);
        at = time;
    }
    Plan { times, late, missed, missed_at, until: until.max(done), next }
}

/// The latest `most` times after one and before another, found without going through all that lie between.
fn latest(
    table: &Timetable,
    after: Timestamp,
    before: Timestamp,
    most: usize,
) -> VecDeque<Timestamp> {
    let mut width = SignedDuration::from_secs(60);
    loop {
        let start = before.checked_sub(width).map_or(after, |start| start.max(after));
        let (mut at, mut found) = (start, VecDeque::new());
        while let Some(time) = table.next(at).filter(|time| *time < before) {
            at = time;
            push(&mut found, time, most);
        }
        if found.len() == most || start == after {
            return found;
        }
        width = width.saturating_mul(4);
    }
}

fn push(times: &mut VecDeque<Timestamp>, time: Timestamp, most: usize) {
    if most == 0 {
        return;
    }
    if times.len() == most {
        times.pop_front();
    }
    times.push_back(time);
}

#[cfg(test)]
mod tests {
    use super::super::timetable::system_time;
    use super::*;

    const GRACE: Duration = Duration::from_secs(60);

    fn at(text: &str) -> Timestamp {
        format!("2026-03-01T{text}Z").parse().unwrap()
    }

    fn planned(cron: &str, missed: Missed, done: &str, now: &str) -> Plan {
        let table = Timetable::cron(cron, "UTC").unwrap();
        plan(&table, Policy { missed, grace: GRACE, catch_up: 3 }, at(done), at(now))
    }

    fn expect(times: &[&str], late: usize, missed: u64, missed_at: Option<&str>) -> Plan {
        Plan {
            times: times.iter().map(|time| at(time)).collect(),
            late,
            missed,
            missed_at: missed_at.map(at),
            until: at("12:00:30"),
            next: Some(at("12:10:00")),
        }
    }

    #[test]
    fn what_is_in_time_is_produced_whatever_the_policy() {
        for missed in [Missed::Skip, Missed::Once, Missed::All] {
            let plan = planned("*/10 * * * *", missed, "11:50:00", "12:00:30");
            assert_eq!(plan, expect(&["12:00:00"], 0, 0, None));
            let plan = planned("*/10 * * * *", missed, "12:00:00", "12:00:30");
            assert_eq!(plan, expect(&[], 0, 0, None));
        }
    }

    #[test]
    fn what_was_missed_goes_by_the_policy() {
        let planned = |missed| planned("*/10 * * * *", missed, "11:00:00", "12:00:30");
        assert_eq!(planned(Missed::Skip), expect(&["12:00:00"], 0, 5, Some("11:50:00")));
        let once = expect(&["11:50:00", "12:00:00"], 1, 4, Some("11:50:00"));
        assert_eq!(planned(Missed::Once), once);
        let all = ["11:30:00", "11:40:00", "11:50:00", "12:00:00"];
        assert_eq!(planned(Missed::All), expect(&all, 3, 2, Some("11:50:00")));
    }

    #[test]
    fn more_than_a_transaction_takes_comes_in_parts() {
        let table = Timetable::cron("* * * * * *", "UTC").unwrap();
        let policy = Policy { missed: Missed::All, grace: GRACE * 15, catch_up: 1000 };
        let (mut done, now, mut all) = (at("11:00:00"), at("12:00:00"), Vec::new());
        loop {
            let part = plan(&table, policy, done, now);
            assert!(part.times.len() <= 1_000 + MOST);
            all.extend(part.times);
            done = part.until;
            if part.next.is_none_or(|next| next > now) {
                break;
            }
        }
        // In time are 901, before that there are 1,000.
        assert_eq!(all.len(), 1_901);
        assert!(all.windows(2).all(|pair| pair[1].as_second() - pair[0].as_second() == 1));
        assert_eq!(all.last(), Some(&now));
    }

    #[test]
    fn years_of_seconds_are_not_gone_through() {
        let table = Timetable::cron("* * * * * *", "Europe/Berlin").unwrap();
        let done = "1990-01-01T00:00:00Z".parse().unwrap();
        for (missed, late) in [(Missed::Skip, 0), (Missed::Once, 1), (Missed::All, 200)] {
            let policy = Policy { missed, grace: GRACE, catch_up: 200 };
            let plan = plan(&table, policy, done, at("12:00:00"));
            assert_eq!((plan.late, plan.missed), (late, MOST_COUNTED - late as u64));
            assert_eq!(plan.missed_at, Some(at("11:58:59")));
            assert_eq!(plan.times.len(), late + 61);
            assert!(plan.times.windows(2).all(|p| p[1].as_second() - p[0].as_second() == 1));
        }
    }

    #[test]
    fn a_single_time_is_over_then() {
        let time = at("11:00:00");
        let table = Timetable::at(system_time(time)).unwrap();
        let plan = |missed, now| {
            let policy = Policy { missed, grace: GRACE, catch_up: 3 };
            let plan = super::plan(&table, policy, at("10:00:00"), at(now));
            (plan.times.len(), plan.missed, plan.next.is_some())
        };
        assert_eq!(plan(Missed::Once, "10:59:59"), (0, 0, true));
        assert_eq!(plan(Missed::Once, "11:00:00"), (1, 0, false));
        assert_eq!(plan(Missed::Once, "12:00:00"), (1, 0, false));
        assert_eq!(plan(Missed::Skip, "12:00:00"), (0, 1, false));
    }
}
