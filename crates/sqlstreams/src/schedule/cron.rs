//! Cron expressions: which times of a calendar they mean. Of time zones this knows nothing.

use jiff::ToSpan;
use jiff::civil::{Date, DateTime, Time};

/// How far a next time is looked for: 29 February on a weekday that comes every 40 years, at worst.
const YEARS: i16 = 100;

const MONTHS: [&str; 12] =
    ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const WEEKDAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

const SECOND: Field = Field { name: "second", least: 0, most: 59, names: &[] };
const MINUTE: Field = Field { name: "minute", ..SECOND };
const HOUR: Field = Field { name: "hour", least: 0, most: 23, names: &[] };
const DAY: Field = Field { name: "day of the month", least: 1, most: 31, names: &[] };
const MONTH: Field = Field { name: "month", least: 1, most: 12, names: &MONTHS };
/// 7 is Sunday, as 0 is.
const WEEKDAY: Field = Field { name: "day of the week", least: 0, most: 7, names: &WEEKDAYS };

const SHAPE: &str =
    "Write five fields, minute hour day month weekday (30 2 * * *), or six with the second first.";

/// One field of an expression, and what its numbers may be.
struct Field {
    name: &'static str,
    least: u8,
    most: u8,
    /// Of the numbers from `least` on.
    names: &'static [&'static str],
}

/// A cron expression. Each set is a number with a bit for each of its members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cron {
    seconds: u64,
    minutes: u64,
    hours: u64,
    days: u64,
    /// The last day of the month, whatever its number.
    last_day: bool,
    months: u64,
    weekdays: u64,
    /// A day has to be one of the month's and one of the week's, since one of both is written with a star. Else one is enough.
    both_days: bool,
}

impl Cron {
    /// # Errors
    /// What is wrong with it, and what to write instead.
    pub(super) fn parse(text: &str) -> Result<Self, (String, String)> {
        let text = match text.trim() {
            "@yearly" | "@annually" => "0 0 1 1 *",
            "@monthly" => "0 0 1 * *",
            "@weekly" => "0 0 * * 0",
            "@daily" | "@midnight" => "0 0 * * *",
            "@hourly" => "0 * * * *",
            other if other.starts_with('@') => {
                let hint = "Known are @hourly, @daily, @weekly, @monthly, @yearly, and @every 90s.";
                return Err((format!("there is no {other}"), hint.to_owned()));
            }
            other => other,
        };
        let fields: Vec<&str> = text.split_whitespace().collect();
        let (second, rest) = match fields.len() {
            5 => ("0", fields.as_slice()),
            6 => (fields[0], &fields[1..]),
            count => {
                return Err((format!("it has {count} fields, not 5 or 6"), SHAPE.to_owned()));
            }
        };
        let (day, weekday) = (either(rest[2]), either(rest[4]));
        // L stands among the days as a member of the list.
        let (last, numbers): (Vec<&str>, Vec<&str>) =
            day.split(',').partition(|item| item.eq_ignore_ascii_case("l"));
        let days = match numbers.is_empty() {
            true => 0,
            false => DAY.parse(&numbers.join(","))?,
        };
        let weekdays = WEEKDAY.parse(weekday)?;
        let cron = Self {
            seconds: SECOND.parse(second)?,
            minutes: MINUTE.parse(rest[0])?,
            hours: HOUR.parse(rest[1])?,
            days,
            last_day: !last.is_empty(),
            months: MONTH.parse(rest[3])?,
            weekdays: weekdays & 0x7f | weekdays >> 7,
            both_days: day.starts_with('*') || weekday.starts_with('*'),
        };
        let any = DateTime::constant(2000, 1, 1, 0, 0, 0, 0);
        match cron.from(any) {
            Some(_) => Ok(cron),
            None => Err((
                "no such day ever comes".to_owned(),
                "Months have 28 to 31 days; L is the last of each.".to_owned(),
            )),
        }
    }

    /// Whether it takes each hour of the day: then it is about what clocks show, and not about times of the day.
    pub(super) fn is_hourly(&self) -> bool {
        self.hours == (1 << 24) - 1
    }

    /// The first of its times that is not before this one; `None`: there is none in the next hundred years.
    pub(super) fn from(&self, at: DateTime) -> Option<DateTime> {
        // To the next whole second.
        let at = match at.subsec_nanosecond() {
            0 => at,
            _ => at.checked_add(1.second()).ok()?.with().subsec_nanosecond(0).build().ok()?,
        };
        let last_year = at.year().saturating_add(YEARS);
        let (mut day, mut earliest) = (at.date(), at.time());
        while day.year() <= last_year {
            if self.months & bit(day.month()) == 0 {
                day = day.last_of_month().tomorrow().ok()?;
            } else if let Some(time) = self.is_day(day).then(|| self.time_from(earliest)).flatten()
            {
                return Some(day.to_datetime(time));
            } else {
                day = day.tomorrow().ok()?;
            }
            earliest = Time::midnight();
        }
        None
    }

    fn is_day(&self, day: Date) -> bool {
        let of_month =
            self.days & bit(day.day()) != 0 || self.last_day && day.day() == day.days_in_month();
        let of_week = self.weekdays & bit(day.weekday().to_sunday_zero_offset()) != 0;
        if self.both_days { of_month && of_week } else { of_month || of_week }
    }

    fn time_from(&self, earliest: Time) -> Option<Time> {
        let (hour, minute, second) = (earliest.hour(), earliest.minute(), earliest.second());
        let in_minute = |hour: i8, minute: i8, from: i8| {
            first(self.seconds, from).map(|second| (hour, minute, second))
        };
        let in_hour = |hour: i8, from: i8| {
            first(self.minutes, from).and_then(|minute| in_minute(hour, minute, 0))
        };
        let this_minute = || {
            let runs = self.hours & bit(hour) != 0 && self.minutes & bit(minute) != 0;
            runs.then(|| in_minute(hour, minute, second)).flatten()
        };
        let this_hour =
            || (self.hours & bit(hour) != 0).then(|| in_hour(hour, minute + 1)).flatten();
        let later = || first(self.hours, hour + 1).and_then(|hour| in_hour(hour, 0));
        let (hour, minute, second) = this_minute().or_else(this_hour).or_else(later)?;
        Time::new(hour, minute, second, 0).ok()
    }
}

/// `?`, as some write for the days that the other field is about: no day in particular.
fn either(field: &str) -> &str {
    if field == "?" { "*" } else { field }
}

fn bit(number: i8) -> u64 {
    1_u64.checked_shl(u32::from(number.unsigned_abs())).unwrap_or(0)
}

/// The lowest member that is not below a number.
fn first(set: u64, from: i8) -> Option<i8> {
    let rest = set.checked_shr(u32::from(from.unsigned_abs()))?;
    (rest != 0).then(|| from + rest.trailing_zeros() as i8)
}

impl Field {
    /// `*`, `7`, `mon-fri`, `*/15`, `8-18/2`, `5/10`, and lists of these.
    fn parse(&self, text: &str) -> Result<u64, (String, String)> {
        text.split(',').try_fold(0, |set, item| Ok(set | self.item(item)?))
    }

    fn item(&self, item: &str) -> Result<u64, (String, String)> {
        let (range, step) = match item.split_once('/') {
            Some((range, step)) => (range, Some(step)),
            None => (item, None),
        };
        let (from, to) = match range.split_once('-') {
            _ if range == "*" => (self.least, self.highest()),
            Some((from, to)) => (self.number(from, item)?, self.number(to, item)?),
            None => {
                let from = self.number(range, item)?;
                (from, if step.is_some() { self.highest() } else { from })
            }
        };
        if from > to {
            let hint = format!("A range goes upwards; write {item:?} as a list of two.");
            return Err((format!("{item:?} is no {} range", self.name), hint));
        }
        let step = match step.map(str::parse::<u8>) {
            None => 1,
            Some(Ok(step @ 1..)) => step,
            Some(_) => return Err(self.wrong(item)),
        };
        Ok((from..=to).step_by(usize::from(step)).fold(0, |set, number| set | 1 << number))
    }

    /// Of a star: Sunday counts once.
    fn highest(&self) -> u8 {
        if self.most == 7 { 6 } else { self.most }
    }

    fn number(&self, text: &str, item: &str) -> Result<u8, (String, String)> {
        let name = self.names.iter().position(|name| name.eq_ignore_ascii_case(text));
        let number = match name {
            Some(place) => u8::try_from(place).ok().map(|place| self.least + place),
            None if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
            None => None,
        };
        number
            .filter(|number| (self.least..=self.most).contains(number))
            .ok_or_else(|| self.wrong(item))
    }

    fn wrong(&self, item: &str) -> (String, String) {
        if item.starts_with('?') {
            let hint =
                "Write *: ? stands for it in the day of the month and that of the week, by itself.";
            return (format!("{item:?} is no {}", self.name), hint.to_owned());
        }
        let names = match self.names {
            [first, .., last] => format!(" or {first} to {last}"),
            _ => String::new(),
        };
        let hint = format!(
            "A {} is {} to {}{names}; also *, ranges (1-5), steps (*/5) and lists (1,2).",
            self.name, self.least, self.most
        );
        (format!("{item:?} is no {}", self.name), hint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(cron: &str, from: &str, count: usize) -> Vec<String> {
        let cron = Cron::parse(cron).unwrap();
        let mut at: DateTime = from.parse().unwrap();
        let mut times = Vec::new();
        while times.len() < count {
            at = cron.from(at).unwrap();
            times.push(at.to_string().replace('T', " "));
            at = at.checked_add(1.nanosecond()).unwrap();
        }
        times
    }

    #[test]
    fn fields_ranges_steps_lists_and_names() {
        for (cron, expected) in [
            ("30 2 * * *", ["2026-02-28 02:30:00", "2026-03-01 02:30:00"]),
            ("*/15 * * * *", ["2026-02-27 12:00:00", "2026-02-27 12:15:00"]),
            ("5/20 12 * * *", ["2026-02-27 12:05:00", "2026-02-27 12:25:00"]),
            ("10-20/5,50 * * * *", ["2026-02-27 12:10:00", "2026-02-27 12:15:00"]),
            ("*/10 * * * * *", ["2026-02-27 12:00:00", "2026-02-27 12:00:10"]),
            ("1 2 3 * * *", ["2026-02-28 03:02:01", "2026-03-01 03:02:01"]),
            ("0 9 * * MON-Fri", ["2026-03-02 09:00:00", "2026-03-03 09:00:00"]),
            ("0 9 * * 5-7", ["2026-02-28 09:00:00", "2026-03-01 09:00:00"]),
            ("0 0 * * 7", ["2026-03-01 00:00:00", "2026-03-08 00:00:00"]),
            ("0 0 1 jan,JUL *", ["2026-07-01 00:00:00", "2027-01-01 00:00:00"]),
            ("0 0 ? * 0", ["2026-03-01 00:00:00", "2026-03-08 00:00:00"]),
            ("@hourly", ["2026-02-27 12:00:00", "2026-02-27 13:00:00"]),
            ("@daily", ["2026-02-28 00:00:00", "2026-03-01 00:00:00"]),
            ("@weekly", ["2026-03-01 00:00:00", "2026-03-08 00:00:00"]),
            (" @monthly ", ["2026-03-01 00:00:00", "2026-04-01 00:00:00"]),
            ("@yearly", ["2027-01-01 00:00:00", "2028-01-01 00:00:00"]),
        ] {
            assert_eq!(times(cron, "2026-02-27T12:00:00", 2), expected, "{cron}");
        }
    }

    #[test]
    fn short_months_have_no_31st_but_a_last_day() {
        let days = |cron| times(cron, "2026-01-31T00:00:01", 4);
        assert_eq!(
            days("0 0 31 * *"),
            ["2026-03-31", "2026-05-31", "2026-07-31", "2026-08-31"]
                .map(|d| format!("{d} 00:00:00"))
        );
        assert_eq!(
            days("0 0 l * *"),
            ["2026-02-28", "2026-03-31", "2026-04-30", "2026-05-31"]
                .map(|d| format!("{d} 00:00:00"))
        );
        assert_eq!(days("0 0 15,L * *")[..2], ["2026-02-15 00:00:00", "2026-02-28 00:00:00"]);
        assert_eq!(days("0 0 29 2 *")[..2], ["2028-02-29 00:00:00", "2032-02-29 00:00:00"]);
    }

    /// As cron has it: of a day of the month and one of the week either is enough, unless one begins with a star.
    #[test]
    fn days_of_month_and_week() {
        let either = times("0 0 13 * fri", "2026-03-01T00:00:00", 3);
        assert_eq!(either, ["2026-03-06 00:00:00", "2026-03-13 00:00:00", "2026-03-20 00:00:00"]);
        let both = times("0 0 */2 * fri", "2026-03-01T00:00:00", 2);
        assert_eq!(both, ["2026-03-13 00:00:00", "2026-03-27 00:00:00"]);
        let rare = times("0 0 29 feb */3", "2026-03-01T00:00:00", 2);
        assert_eq!(rare, ["2032-02-29 00:00:00", "2040-02-29 00:00:00"]);
    }

    #[test]
    fn times_are_not_before_what_is_asked_for() {
        assert_eq!(times("* * * * * *", "2026-12-31T23:59:59.1", 1), ["2027-01-01 00:00:00"]);
        assert_eq!(times("0 0 * * *", "2026-12-31T00:00:00", 1), ["2026-12-31 00:00:00"]);
        assert_eq!(times("59 59 23 31 12 *", "2026-12-31T23:59:59", 1), ["2026-12-31 23:59:59"]);
        let end = Cron::parse("* * * * *").unwrap();
        assert_eq!(end.from(DateTime::MAX), None);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_a_hint() {
        for (cron, said) in [
            ("", "0 fields"),
            ("* * * *", "4 fields"),
            ("* * * * * * *", "7 fields"),
            ("60 * * * *", "\"60\" is no minute"),
            ("60 0 0 * * *", "\"60\" is no second"),
            ("0 24 * * *", "is no hour"),
            ("0 0 0 * *", "is no day of the month"),
            ("0 0 32 * *", "is no day of the month"),
            ("0 0 * 13 *", "is no month"),
            ("0 0 * foo *", "is no month"),
            ("0 0 * * 8", "is no day of the week"),
            ("0 0 * * fri-mon", "range"),
            ("0 20-4 * * *", "range"),
            ("*/0 * * * *", "is no minute"),
            ("*/x * * * *", "is no minute"),
            ("1-2-3 * * * *", "is no minute"),
            ("-1 * * * *", "is no minute"),
            ("+1 * * * *", "is no minute"),
            ("1,,2 * * * *", "is no minute"),
            ("256 * * * *", "is no minute"),
            ("0 0 L-1 * *", "is no day of the month"),
            ("0 0 30 2 *", "ever comes"),
            ("0 0 31 4,6,9,11 *", "ever comes"),
            ("@reboot", "there is no @reboot"),
        ] {
            let (error, hint) = Cron::parse(cron).unwrap_err();
            assert!(error.contains(said) && !hint.is_empty(), "{cron}: {error}");
        }
    }

    #[test]
    fn a_question_mark_is_a_star_for_days() {
        for (cron, same) in [("5 4 ? * fri", "5 4 * * fri"), ("5 4 13 * ?", "5 4 13 * *")] {
            assert_eq!(Cron::parse(cron), Cron::parse(same), "{cron}");
        }
        for cron in ["? 4 * * *", "? 0 4 * * *", "0 ? * * *", "0 0 * ? *", "0 0 ?/2 * *"] {
            let (error, hint) = Cron::parse(cron).unwrap_err();
            assert!(error.contains('?') && hint.starts_with("Write *:"), "{cron}: {error}, {hint}");
        }
    }

    /// Beside a search that tries every second.
    #[test]
    fn agrees_with_trying_every_second() {
        for cron in ["7 3,11-13 4 * * *", "*/7 1/9 */5 * * *", "0 59 23 * * *", "5-9 * 0 1,2 * tue"]
        {
            let cron = Cron::parse(cron).unwrap();
            let mut at: DateTime = "2026-02-28T21:00:00".parse().unwrap();
            let mut next = cron.from(at).unwrap();
            for _ in 0..3 * 86_400 {
                let (day, time) = (at.date(), at.time());
                let set = |set: u64, member: i8| set & (1 << member) != 0;
                let runs = set(cron.months, day.month())
                    && cron.is_day(day)
                    && set(cron.hours, time.hour())
                    && set(cron.minutes, time.minute())
                    && set(cron.seconds, time.second());
                assert_eq!(runs, at == next, "{at}");
                at = at.checked_add(1.second()).unwrap();
                if runs {
                    next = cron.from(at).unwrap();
                }
            }
        }
    }
}
