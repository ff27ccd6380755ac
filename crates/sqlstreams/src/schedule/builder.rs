//! Making and changing schedules.

use std::time::{Duration, SystemTime};

use tokio_postgres::types::ToSql;

use super::Schedule;
use super::catch_up::Missed;
use super::timetable::Timetable;
use crate::client::Client;
use crate::error::{Error, ErrorKind, Result};
use crate::message::{Encoded, Outgoing, When};
use crate::name::check_name;
use crate::payload::{Codec, PayloadType};
use crate::stream::{Stream, seconds};

/// A schedule that is to be opened, made or changed; from [`Client::schedule`].
#[derive(Debug)]
#[must_use]
pub struct ScheduleBuilder {
    client: Client,
    name: String,
    cron: Option<String>,
    at: Option<SystemTime>,
    zone: Option<String>,
    missed: Option<Missed>,
    grace: Option<Duration>,
    catch_up: Option<u32>,
    message: Option<Result<Produced>>,
}

/// What it produces, and for which stream.
#[derive(Debug)]
struct Produced {
    stream: String,
    /// In its text form.
    payload: Option<String>,
    message: Encoded,
    expires_in: Option<f64>,
}

impl ScheduleBuilder {
    pub(super) fn new(client: Client, name: String) -> Self {
        Self {
            client,
            name,
            cron: None,
            at: None,
            zone: None,
            missed: None,
            grace: None,
            catch_up: None,
            message: None,
        }
    }

    /// Its times, as a cron expression; see [`Timetable::cron`].
    pub fn cron(mut self, expression: impl Into<String>) -> Self {
        (self.cron, self.at) = (Some(expression.into()), None);
        self
    }

    /// A single time, which has to lie ahead. For many of them, as one for each order, use messages with
    /// [`deliver_at`](Outgoing::deliver_at) instead: they leave nothing behind.
    pub fn at(mut self, time: SystemTime) -> Self {
        (self.cron, self.at) = (None, Some(time));
        self
    }

    /// The time zone whose clocks the expression is about, by its IANA name. Default: `UTC`.
    pub fn zone(mut self, zone: impl Into<String>) -> Self {
        self.zone = Some(zone.into());
        self
    }

    /// What becomes of times that were missed. Default: [`Missed::Once`].
    pub fn missed(mut self, missed: Missed) -> Self {
        self.missed = Some(missed);
        self
    }

    /// A time counts as missed when it is later than this, 1 second to 1 day. Default: 1 minute.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = Some(grace);
        self
    }

    /// With [`Missed::All`]: so many times at most are made up for, the latest, 1 to 1,000. Default: 100.
    pub fn catch_up(mut self, most: u32) -> Self {
        self.catch_up = Some(most);
        self
    }

    /// What it produces, and for which stream. Two headers are added, `schedule`, its name, and `fire_time`, the time that the message is for
    /// (`2026-03-29T00:30:00Z`); and `missed`, a number, where times before it were missed for which there is no message. A message that
    /// [expires](Outgoing::expires_in) does so counted from when it is produced.
    pub fn produce<T, C: Codec<T>>(
        mut self,
        stream: &Stream<T, C>,
        message: Outgoing<'_, T>,
    ) -> Self {
        self.message = Some(Produced::new(stream, &message));
        self
    }

    /// Creates the schedule.
    ///
    /// # Errors
    /// [`ScheduleExists`](ErrorKind::ScheduleExists), [`UnknownStream`](ErrorKind::UnknownStream),
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for an expression, zone or setting that makes no sense,
    /// [`InvalidMessage`](ErrorKind::InvalidMessage) for a message that the stream does not take, or the database's.
    pub async fn create(self) -> Result<Schedule> {
        self.put(false).await
    }

    /// Creates the schedule, or changes the one of this name to exactly this: what a program does at its start. Where its times are the same
    /// as before, it goes on with them; its history stays. Where all is the same, nothing happens.
    ///
    /// # Errors
    /// As [`create`](Self::create), but for "exists".
    pub async fn create_or_replace(self) -> Result<Schedule> {
        self.put(true).await
    }

    /// Opens a schedule that exists; what was set here is ignored.
    ///
    /// # Errors
    /// [`UnknownSchedule`](ErrorKind::UnknownSchedule), with the names that exist as its hint, or the database's.
    pub async fn open(self) -> Result<Schedule> {
        self.client.find_schedule(&self.name).await?;
        Ok(Schedule::new(self.client, self.name))
    }

    /// Changes a schedule that exists: what was set here; the rest stays. With other times it begins anew, from now on. The message
    /// is changed as a whole, and stays one for the same stream.
    ///
    /// # Errors
    /// [`UnknownSchedule`](ErrorKind::UnknownSchedule), and those of [`create`](Self::create).
    pub async fn alter(self) -> Result<Schedule> {
        let info = self.client.find_schedule(&self.name).await?;
        let message = self.message.transpose()?;
        if let Some(other) = message.as_ref().filter(|message| message.stream != info.stream) {
            let text = format!("schedule {:?} produces for stream {:?}", self.name, info.stream);
            return Err(Error::new(ErrorKind::InvalidArgument, text).with_hint(format!(
                "Replace it as a whole, for it to produce for {:?}.",
                other.stream
            )));
        }
        // The times as they will be.
        let cron = self.cron.or_else(|| info.cron.clone().filter(|_| self.at.is_none()));
        let at = self.at.or(info.at.filter(|_| cron.is_none())).map(whole_micros);
        let zone = self.zone.unwrap_or_else(|| info.zone.clone());
        let is_new = (&cron, at, &zone) != (&info.cron, info.at, &info.zone);
        let since = self.client.server_time().await?;
        let next = match is_new {
            true => first(cron.as_deref(), at, &zone, since)?,
            false => None,
        };
        let (cron, at) = if is_new { (cron, at) } else { (None, None) };
        let parts = message.as_ref().map(|produced| &produced.message);
        let params: [&(dyn ToSql + Sync); 15] = [
            &self.name,
            &cron,
            &at,
            &zone,
            &self.missed.map(Missed::as_str),
            &self.grace.map(seconds),
            &self.catch_up.map(i64::from),
            &message.as_ref().and_then(|produced| produced.payload.as_deref()),
            &parts.and_then(|parts| parts.key.as_deref()),
            &parts.and_then(|parts| parts.routing_key.as_deref()),
            &parts.and_then(|parts| parts.headers.as_deref()),
            &message.as_ref().and_then(|produced| produced.expires_in),
            &message.is_some(),
            &since,
            &next,
        ];
        let alter = &self.client.inner.queries.alter_schedule;
        self.client.query(alter, &params, "change the schedule").await?;
        self.client.inner.watcher.rang(0);
        Ok(Schedule::new(self.client, self.name))
    }

    async fn put(self, replace: bool) -> Result<Schedule> {
        check_name("schedule", &self.name)?;
        let lacks = |what: &str, hint: &str| {
            let text = format!("schedule {:?} has no {what}", self.name);
            Error::new(ErrorKind::InvalidArgument, text).with_hint(hint)
        };
        let Some(message) = self.message.transpose()? else {
            return Err(lacks("message", "Say what it is to produce."));
        };
        if self.cron.is_none() && self.at.is_none() {
            return Err(lacks("times", "Give it a cron expression, or a time."));
        }
        let at = self.at.map(whole_micros);
        let zone = self.zone.as_deref().unwrap_or("UTC");
        let since = self.client.server_time().await?;
        let next = first(self.cron.as_deref(), at, zone, since)?;
        let parts = &message.message;
        let params: [&(dyn ToSql + Sync); 16] = [
            &self.name,
            &message.stream,
            &message.payload,
            &self.cron,
            &at,
            &zone,
            &self.missed.unwrap_or_default().as_str(),
            &self.grace.map(seconds),
            &self.catch_up.map(i64::from),
            &parts.key,
            &parts.routing_key,
            &parts.headers,
            &message.expires_in,
            &replace,
            &since,
            &next,
        ];
        let create = &self.client.inner.queries.create_schedule;
        self.client.query(create, &params, "create the schedule").await?;
        self.client.inner.watcher.rang(0);
        Ok(Schedule::new(self.client, self.name))
    }
}

/// The first of these times after one; `None` for a single time that has been, which the server refuses where it is new.
fn first(
    cron: Option<&str>,
    at: Option<SystemTime>,
    zone: &str,
    since: SystemTime,
) -> Result<Option<SystemTime>> {
    let Some(cron) = cron else {
        return Ok(Timetable::at(at.unwrap_or(since))?.next_after(since));
    };
    let next = Timetable::since(cron, zone, since)?.next_after(since);
    let over = || {
        Error::new(ErrorKind::InvalidArgument, "none of these times comes any more")
            .with_hint("Give some that lie ahead.")
    };
    next.map(Some).ok_or_else(over)
}

/// As precise as the database is.
fn whole_micros(time: SystemTime) -> SystemTime {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => time - Duration::from_nanos(u64::from(since.subsec_nanos() % 1_000)),
        Err(_) => time,
    }
}

impl Produced {
    fn new<T, C: Codec<T>>(stream: &Stream<T, C>, message: &Outgoing<'_, T>) -> Result<Self> {
        let inner = &stream.inner;
        let mut encoded = message.clone().encode::<C>(inner.payload_type, inner.compacted)?;
        let refused = |what: &str| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("the message of a schedule has no {what}"),
            )
        };
        if encoded.idempotency_key.is_some() {
            return Err(refused("idempotency key").with_hint("Each of its times is produced once."));
        }
        if encoded.deliver.is_some() {
            return Err(refused("delay").with_hint("It is produced when the schedule says."));
        }
        if encoded.expected.is_some() {
            return Err(refused("expectation of what is latest"));
        }
        let expires_in = match encoded.expires {
            None => None,
            Some(When::After(time)) => Some(seconds(time)),
            Some(When::At(_)) => {
                return Err(refused("time to expire").with_hint("Say after how long instead."));
            }
        };
        let payload = encoded.payload.take().map(|payload| match inner.payload_type {
            PayloadType::Bytea => {
                let hex = payload.0.iter().map(|byte| format!("{byte:02x}"));
                format!("\\x{}", hex.collect::<String>())
            }
            // Checked when it was encoded.
            _ => String::from_utf8_lossy(&payload.0).into_owned(),
        });
        Ok(Self { stream: inner.name.clone(), payload, message: encoded, expires_in })
    }
}
