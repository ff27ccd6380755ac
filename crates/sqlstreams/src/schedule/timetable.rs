//! The times of a schedule: a cron expression in a time zone, a period, or one time.

use std::time::{Duration, SystemTime};

use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Timestamp};

use super::cron::Cron;
use crate::error::{Error, ErrorKind, Result};
use crate::name::shorten;

/// The times of a schedule.
///
/// ```
/// use sqlstreams::Timetable;
/// use std::time::{Duration, SystemTime};
///
/// let nightly = Timetable::cron("30 2 * * *", "Europe/Berlin")?;
/// let first = nightly.next_after(SystemTime::UNIX_EPOCH).unwrap();
/// assert_eq!(first, SystemTime::UNIX_EPOCH + Duration::from_secs(90 * 60)); // there it was one o'clock then
/// # Ok::<(), sqlstreams::Error>(())
/// ```
///
/// # When clocks are changed
///
/// An expression whose hours are all hours of the day, as `*/15 * * * *` or `@hourly`, follows the clock: it has its times
/// whenever a clock of the zone shows them. Where clocks are put back, it has them twice; where they are put forward, those
/// that no clock shows are left out. So it goes on quarter by quarter.
///
/// With any other, as `30 2 * * *` or `0 8-18/2 * * *`, each time of the day comes exactly once a day. One that is skipped comes
/// in the moment in which the clocks are put forward; of one that comes twice, only the first counts.
#[derive(Debug, Clone)]
pub struct Timetable {
    times: Times,
    zone: TimeZone,
}

#[derive(Debug, Clone)]
enum Times {
    Cron(Box<Cron>),
    /// Whole seconds.
    Every {
        period: i64,
        since: i64,
    },
    Once(Timestamp),
}

impl Timetable {
    /// The times of a cron expression, as clocks in a time zone show them: five fields (minute, hour, day of the month, month, day of
    /// the week), six with the second first, or one of `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`. `zone` is an
    /// [IANA](https://www.iana.org/time-zones) name, as `Europe/Berlin` or `UTC`. `@every 90s` counts from 1970 here, and from its
    /// creation where it is a schedule's.
    ///
    /// Zones are looked up in the machine's own database (`/usr/share/zoneinfo`), or if it has none, in one that is part of the crate.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for what is no expression, one that has no times, or an unknown zone.
    pub fn cron(expression: &str, zone: &str) -> Result<Self> {
        Self::since(expression, zone, SystemTime::UNIX_EPOCH)
    }

    /// One time.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) after the year 9999.
    pub fn at(time: SystemTime) -> Result<Self> {
        let time = Timestamp::try_from(time).map_err(|e| {
            Error::new(ErrorKind::InvalidArgument, "a schedule's time is before the year 10000")
                .with_source(e)
        })?;
        Ok(Self { times: Times::Once(time), zone: TimeZone::UTC })
    }

    /// `since`: where `@every` counts from.
    pub(super) fn since(expression: &str, zone: &str, since: SystemTime) -> Result<Self> {
        let zone = TimeZone::get(zone).map_err(|e| {
            let text = format!("there is no time zone {}", shorten(zone));
            Error::new(ErrorKind::InvalidArgument, text)
                .with_hint("Give its IANA name, as Europe/Berlin or UTC.")
                .with_source(e)
        })?;
        let times = match expression.trim().strip_prefix("@every") {
            Some(period) if period.is_empty() || period.starts_with(char::is_whitespace) => {
                let since = Timestamp::try_from(since).unwrap_or(Timestamp::UNIX_EPOCH);
                Times::Every { period: seconds(period.trim())?, since: since.as_second() }
            }
            _ => Times::Cron(Box::new(Cron::parse(expression).map_err(|(error, hint)| {
                let text = format!("{} is no cron expression: {error}", shorten(expression));
                Error::new(ErrorKind::InvalidArgument, text).with_hint(hint)
            })?)),
        };
        Ok(Self { times, zone })
    }

    /// The first of its times after another; `None` when none comes any more.
    pub fn next_after(&self, time: SystemTime) -> Option<SystemTime> {
        let after = Timestamp::try_from(time).ok()?;
        self.next(after).map(system_time)
    }

    pub(super) fn next(&self, after: Timestamp) -> Option<Timestamp> {
        match &self.times {
            Times::Once(time) => (*time > after).then_some(*time),
            Times::Every { period, since } => {
                let passed = (after.as_second().saturating_sub(*since)).div_euclid(*period);
                let next = since.checked_add(passed.checked_add(1)?.checked_mul(*period)?)?;
                Timestamp::from_second(next).ok()
            }
            Times::Cron(cron) if cron.is_hourly() => self.next_shown(cron, after),
            Times::Cron(cron) => self.next_of_day(cron, after),
        }
    }

    /// The next time that clocks show. Between two changes of the clocks they run evenly.
    fn next_shown(&self, cron: &Cron, after: Timestamp) -> Option<Timestamp> {
        let mut from = after.checked_add(SignedDuration::from_nanos(1)).ok()?;
        loop {
            let offset = self.zone.to_offset(from);
            let change = self.zone.following(from).next().map(|change| change.timestamp());
            let next =
                cron.from(offset.to_datetime(from)).and_then(|at| offset.to_timestamp(at).ok());
            match (next, change) {
                (Some(next), Some(change)) if next < change => return Some(next),
                (next, None) => return next,
                // From the change on clocks show something else.
                (_, Some(change)) => from = change,
            }
        }
    }

    /// The next time of a day. Later ones of those never come sooner, so the first that lies behind is the one.
    fn next_of_day(&self, cron: &Cron, after: Timestamp) -> Option<Timestamp> {
        let mut from = self.zone.to_datetime(after);
        loop {
            let at = cron.from(from)?;
            let shown = self.zone.to_ambiguous_timestamp(at);
            let next = match shown.offset() {
                // Counted on by the old offset, it lies behind the change, by less than what is skipped.
                AmbiguousOffset::Gap { before, .. } => {
                    let beyond = before.to_timestamp(at).ok()?;
                    let after = beyond.checked_add(SignedDuration::from_nanos(1)).ok()?;
                    self.zone.preceding(after).next().map_or(beyond, |change| change.timestamp())
                }
                _ => shown.earlier().ok()?,
            };
            if next > after {
                return Some(next);
            }
            from = at.checked_add(SignedDuration::from_secs(1)).ok()?;
        }
    }
}

/// Every time of the calendar is one of the system's.
pub(super) fn system_time(time: Timestamp) -> SystemTime {
    SystemTime::try_from(time).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// `90s`, `5m`, `1h30m`, `2d`.
fn seconds(text: &str) -> Result<i64> {
    let wrong = || {
        Error::new(ErrorKind::InvalidArgument, format!("{} is no period", shorten(text)))
            .with_hint("Write it as @every 90s, 5m, 1h30m or 2d, 1 second to 365 days.")
    };
    let (mut sum, mut rest) = (0_i64, text);
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let number: i64 = rest[..end].parse().map_err(|_| wrong())?;
        let mut after = rest[end..].chars();
        let unit = match after.next() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3_600,
            Some('d') => 86_400,
            _ => return Err(wrong()),
        };
        rest = after.as_str().trim_start();
        let part = number.checked_mul(unit);
        sum = part.and_then(|part| sum.checked_add(part)).ok_or_else(wrong)?;
    }
    match Duration::from_secs(sum.unsigned_abs()) {
        period if (1..=365 * 86_400).contains(&period.as_secs()) => Ok(sum),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use jiff::civil::Date;

    use super::*;

    fn timestamps(cron: &str, zone: &str, from: &str, count: usize) -> Vec<String> {
        let table = Timetable::cron(cron, zone).unwrap();
        let mut at: Timestamp = from.parse().unwrap();
        let mut times = Vec::new();
        while times.len() < count {
            let next = table.next(at).unwrap();
            assert!(next > at, "{cron} in {zone} after {at}: {next}");
            times.push(next.to_string());
            at = next;
        }
        times
    }

    /// How often each day of a year in the zone has a time, and the times that clocks show there.
    fn year(cron: &str, zone: &str, year: i16) -> BTreeMap<Date, Vec<String>> {
        let table = Timetable::cron(cron, zone).unwrap();
        let tz = TimeZone::get(zone).unwrap();
        let first = tz.to_timestamp(Date::constant(year, 1, 1).at(0, 0, 0, 0)).unwrap();
        let mut at = first.checked_sub(SignedDuration::from_secs(1)).unwrap();
        let mut days = BTreeMap::<Date, Vec<String>>::new();
        loop {
            at = table.next(at).unwrap();
            let shown = tz.to_datetime(at);
            if shown.year() != year {
                return days;
            }
            days.entry(shown.date()).or_default().push(shown.time().to_string());
        }
    }

    #[test]
    fn tb_128_a_daily_time_comes_once_on_every_day_of_the_year() {
        for (zone, forward, back) in
            [("Europe/Berlin", (3, 29), (10, 25)), ("America/New_York", (3, 8), (11, 1))]
        {
            let days = year("30 2 * * *", zone, 2026);
            assert_eq!(days.len(), 365, "{zone}");
            for (day, times) in &days {
                let changed = (day.month(), day.day()) == forward;
                let expected = if changed { "03:00:00" } else { "02:30:00" };
                assert_eq!(times, &[expected], "{zone} {day}");
            }
            let back = Date::constant(2026, back.0, back.1);
            assert_eq!(days[&back], ["02:30:00"], "{zone}");
            // And in New York half past one is what comes twice.
            for cron in ["30 1 * * *", "0 0 * * *", "30 3 * * *", "59 59 23 * * *"] {
                let days = year(cron, zone, 2026);
                assert!(
                    days.len() == 365 && days.values().all(|times| times.len() == 1),
                    "{cron} {zone}"
                );
            }
        }
    }

    #[test]
    fn the_first_of_two_and_the_first_moment_after_a_gap() {
        let berlin = |cron, from| timestamps(cron, "Europe/Berlin", from, 2);
        // Forward at 01:00 UTC; back at 01:00 UTC.
        assert_eq!(
            berlin("30 2 * * *", "2026-03-28T02:00:00Z"),
            ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]
        );
        assert_eq!(
            berlin("30 2 * * *", "2026-10-24T12:00:00Z"),
            ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]
        );
        // Asked between the two, the second does not count.
        assert_eq!(berlin("30 2 * * *", "2026-10-25T00:31:00Z")[0], "2026-10-26T01:30:00Z");
        assert_eq!(berlin("30 2 * * *", "2026-10-25T01:10:00Z")[0], "2026-10-26T01:30:00Z");
        // All that is skipped comes at once, and with what is due then anyway.
        assert_eq!(
            berlin("*/15 2,3 * * *", "2026-03-29T00:50:00Z"),
            ["2026-03-29T01:00:00Z", "2026-03-29T01:15:00Z"]
        );
    }

    #[test]
    fn what_follows_the_clock_goes_on_evenly() {
        for zone in ["Europe/Berlin", "America/New_York", "UTC", "Asia/Kathmandu"] {
            for (cron, every) in
                [("*/15 * * * *", 15 * 60), ("@hourly", 3_600), ("0 0-23 * * *", 3_600)]
            {
                let table = Timetable::cron(cron, zone).unwrap();
                let mut at: Timestamp = "2026-01-01T00:15:00Z".parse().unwrap();
                at = table.next(at).unwrap();
                while at < "2027-01-01T00:00:00Z".parse().unwrap() {
                    let next = table.next(at).unwrap();
                    assert_eq!(
                        next.as_second() - at.as_second(),
                        every,
                        "{cron} {zone} after {at}"
                    );
                    at = next;
                }
            }
        }
        // Within the hour that comes twice, asked at any moment.
        assert_eq!(
            timestamps("30 * * * *", "Europe/Berlin", "2026-10-25T00:10:00Z", 3),
            ["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z", "2026-10-25T02:30:00Z"]
        );
    }

    #[test]
    fn odd_zones() {
        // Midnight is skipped in Cairo (24 April 2026), and half an hour on Lord Howe.
        let cairo = year("0 0 * * *", "Africa/Cairo", 2026);
        assert!(cairo.len() == 365 && cairo.values().all(|times| times.len() == 1));
        let island = year("15 2 * * *", "Australia/Lord_Howe", 2026);
        assert!(island.len() == 365 && island.values().all(|times| times.len() == 1));
        // A day that Samoa did not have: it comes when the next begins.
        assert_eq!(
            timestamps("0 12 30 12 *", "Pacific/Apia", "2011-06-01T00:00:00Z", 1),
            ["2011-12-30T10:00:00Z"]
        );
        assert!(Timetable::cron("@daily", "europe/berlin").is_ok());
        for zone in ["", "Mars/Olympus", "+02:00", "local"] {
            let error = Timetable::cron("@daily", zone).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{zone}");
        }
    }

    #[test]
    fn periods_count_from_their_beginning() {
        let since = SystemTime::UNIX_EPOCH + Duration::from_millis(100_500);
        let table = Timetable::since("@every 1m30s", "Europe/Berlin", since).unwrap();
        let next = |s: u64| {
            let next = table.next_after(SystemTime::UNIX_EPOCH + Duration::from_secs(s)).unwrap();
            next.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
        };
        assert_eq!([next(100), next(189), next(190), next(191)], [190, 190, 280, 280]);
        for wrong in [
            "@every",
            "@every 0s",
            "@every 5",
            "@every -5s",
            "@every 366d",
            "@every 1w",
            "@every99s",
            "@every 99999999999999999999s",
        ] {
            assert!(Timetable::cron(wrong, "UTC").is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_single_time_comes_once() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(100);
        let table = Timetable::at(at).unwrap();
        assert_eq!(table.next_after(at - Duration::from_micros(1)), Some(at));
        assert_eq!(table.next_after(at), None);
    }
}
