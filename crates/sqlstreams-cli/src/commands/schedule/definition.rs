//! What can be said of a schedule.

use std::time::{Duration, SystemTime};

use clap::Args;
use sqlstreams::{Bytes, Headers, Missed, Outgoing, ScheduleBuilder, Stream};

use crate::values;

/// What it means, for the help of the commands that say it.
macro_rules! definition {
    () => {
        "\
A cron expression has five fields, minute hour day month weekday, or six with the second first: numbers,
names (mon, jan), *, ranges (8-18), steps (*/15), lists (1,15), L for the last day of the month; or it is
@hourly, @daily, @weekly, @monthly, @yearly or @every 90s. It is about the clocks of --zone. An expression
for all hours of the day follows the clock; any other has each of its times once a day, also when clocks
are put forward or back. `schedule next` shows the times.

A time that is later than --grace counts as missed: nobody did the maintenance. --missed says what becomes of
those: skip, nothing; once, one message for the latest; all, one for each, at most --catch-up.

The message has the headers schedule (its name) and fire_time (2026-03-29T00:30:00Z), and missed (how
many) where times before it were missed for which there is no message.
"
    };
}
pub(super) use definition;

#[derive(Debug, Args)]
#[command(next_help_heading = "Times")]
pub(super) struct Times {
    /// A cron expression: '30 2 * * *'
    #[arg(long, value_name = "EXPRESSION", conflicts_with = "at")]
    pub(super) cron: Option<String>,
    /// A single time: 2026-03-01T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = values::time)]
    pub(super) at: Option<SystemTime>,
    /// The time zone, as Europe/Berlin; UTC if not given
    #[arg(long, value_name = "ZONE")]
    pub(super) zone: Option<String>,
    /// What becomes of times that were missed: skip, once (if not given) or all
    #[arg(long, value_name = "POLICY", value_parser = values::missed)]
    missed: Option<Missed>,
    /// What is later than this is missed, 1s to 1d; 1m if not given
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    grace: Option<Duration>,
    /// With --missed all: so many at most, 1 to 1000; 100 if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    catch_up: Option<u32>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Message")]
pub(super) struct Message {
    /// Its payload
    #[arg(long, value_name = "TEXT", conflicts_with = "tombstone")]
    payload: Option<String>,
    /// It has none: it removes its key from a compacted stream
    #[arg(long, requires = "key")]
    tombstone: bool,
    /// Its key
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Its routing key: orders.eu.created
    #[arg(long, value_name = "KEY")]
    routing_key: Option<String>,
    /// Its headers: a JSON object
    #[arg(long, value_name = "JSON", value_parser = values::headers)]
    headers: Option<Headers>,
    /// So long after it was produced nobody gets it any more
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    expires_in: Option<Duration>,
}

impl Times {
    pub(super) fn is_given(&self) -> bool {
        self.cron.is_some()
            || self.at.is_some()
            || self.zone.is_some()
            || self.missed.is_some()
            || self.grace.is_some()
            || self.catch_up.is_some()
    }

    pub(super) fn on(self, mut schedule: ScheduleBuilder) -> ScheduleBuilder {
        if let Some(cron) = self.cron {
            schedule = schedule.cron(cron);
        }
        if let Some(at) = self.at {
            schedule = schedule.at(at);
        }
        if let Some(zone) = self.zone {
            schedule = schedule.zone(zone);
        }
        if let Some(missed) = self.missed {
            schedule = schedule.missed(missed);
        }
        if let Some(grace) = self.grace {
            schedule = schedule.grace(grace);
        }
        if let Some(most) = self.catch_up {
            schedule = schedule.catch_up(most);
        }
        schedule
    }
}

impl Message {
    /// Whether the message is said as a whole.
    pub(super) fn is_given(&self) -> bool {
        self.payload.is_some() || self.tombstone
    }

    /// Whether something is said that goes with a payload.
    pub(super) fn has_parts(&self) -> bool {
        self.key.is_some()
            || self.routing_key.is_some()
            || self.headers.is_some()
            || self.expires_in.is_some()
    }

    pub(super) fn on(
        self,
        schedule: ScheduleBuilder,
        stream: &Stream<Vec<u8>, Bytes>,
    ) -> ScheduleBuilder {
        let payload = self.payload.unwrap_or_default().into_bytes();
        let mut message = match (self.tombstone, self.key) {
            (true, key) => Outgoing::tombstone(key.unwrap_or_default()),
            (false, None) => Outgoing::new(&payload),
            (false, Some(key)) => Outgoing::new(&payload).key(key),
        };
        if let Some(key) = self.routing_key {
            message = message.routing_key(key);
        }
        if let Some(headers) = self.headers {
            message = message.headers(headers);
        }
        if let Some(time) = self.expires_in {
            message = message.expires_in(time);
        }
        schedule.produce(stream, message)
    }
}
