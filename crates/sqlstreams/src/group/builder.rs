//! Groups that are to be opened or created, and how they are to be set.

use std::time::{Duration, SystemTime};

use tokio_postgres::types::ToSql;

use super::{Group, Mode, RetryPolicy};
use crate::binding::{self, Binding};
use crate::client::Client;
use crate::consume::ConsumerBuilder;
use crate::error::{Error, ErrorKind, Result};
use crate::name::{check_name, shorten};
use crate::payload::{Codec, Json};
use crate::stream::{Stream, existing};

/// Where a new group starts to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Start {
    /// With the first message that is still in the log. The default.
    #[default]
    Beginning,
    /// With what is produced from now on.
    Latest,
    /// With this id.
    Id(i64),
    /// With the first message produced at or after this time, by the database's clock.
    Time(SystemTime),
}

/// A group that is to be opened or created; from [`Stream::group`].
#[must_use]
pub struct GroupBuilder<T, C = Json> {
    stream: Stream<T, C>,
    name: String,
    start: Start,
    retry: Option<RetryPolicy>,
    max_attempts: Option<u32>,
    lease: Option<Duration>,
    max_in_flight: Option<u32>,
    rate_limit: Option<f64>,
    mode: Option<Mode>,
    newest_only: Option<bool>,
    bindings: Option<Vec<Binding>>,
}

impl<T, C> Clone for GroupBuilder<T, C> {
    fn clone(&self) -> Self {
        Self {
            stream: self.stream.clone(),
            name: self.name.clone(),
            start: self.start,
            retry: self.retry,
            max_attempts: self.max_attempts,
            lease: self.lease,
            max_in_flight: self.max_in_flight,
            rate_limit: self.rate_limit,
            mode: self.mode,
            newest_only: self.newest_only,
            bindings: self.bindings.clone(),
        }
    }
}

/// The shortest and the longest lease.
const LEASE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(86_400));
const MOST_BACKOFF: Duration = Duration::from_secs(365 * 86_400);

impl<T, C> GroupBuilder<T, C> {
    pub(crate) fn new(stream: Stream<T, C>, name: String) -> Self {
        Self {
            stream,
            name,
            start: Start::default(),
            retry: None,
            max_attempts: None,
            lease: None,
            max_in_flight: None,
            rate_limit: None,
            mode: None,
            newest_only: None,
            bindings: None,
        }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.stream.inner.client
    }

    /// Where a new group starts; an existing one stays where it is. Default: the beginning.
    pub fn start(mut self, start: Start) -> Self {
        self.start = start;
        self
    }

    /// How failures are tried again. An existing group takes the policy over when it is opened with one.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = Some(policy);
        self
    }

    /// After so many failed attempts a message is dead, whatever the rest of the policy is.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// How long a lease lasts without a heartbeat, 100 ms to 1 day: after a crash, messages wait so long at most. An existing
    /// group takes it over when it is opened with one. Default: 15 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// At most so many messages are handed out and not finished, over all consumers of the group; what a consumer that died
    /// had in hand does not count. 0: no limit, the default. An existing group takes it over when it is opened with one.
    pub fn max_in_flight(mut self, messages: u32) -> Self {
        self.max_in_flight = Some(messages);
        self
    }

    /// At most so many messages per second are handed out, over all consumers of the group, retries included; bursts are no
    /// more than a tenth of a second's worth. 0: no limit, the default. An existing group takes it over when it is opened
    /// with one.
    pub fn rate_limit(mut self, per_second: f64) -> Self {
        self.rate_limit = Some(per_second);
        self
    }

    /// How messages are handed out. Default: [`Mode::Parallel`]. An existing group is changed when it is opened with another one,
    /// if it can be; see [`Group::set_mode`].
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// Leaves the mode of an existing group as it is.
    pub(crate) fn in_any_mode(mut self) -> Self {
        self.mode = None;
        self
    }

    /// Messages of one key one at a time, in id order: short for [`mode`](Self::mode)`(`[`Mode::Ordered`]`)`.
    pub fn ordered(self) -> Self {
        self.mode(Mode::Ordered)
    }

    /// Where very many messages of one key wait, those of other keys do not wait behind them: short for
    /// [`mode`](Self::mode)`(`[`Mode::Fair`]`)`.
    ///
    /// ```no_run
    /// # async fn f(mails: sqlstreams::Stream<String>) -> sqlstreams::Result<()> {
    /// mails.producer().send(&"welcome".to_owned()).key("tenant-7").await?;
    /// mails.group("outbox").fair().consumer().concurrency(16).run(async |mail| {
    ///     println!("for {:?}: {}", mail.key, mail.payload);
    /// }).await?;
    /// # Ok(()) }
    /// ```
    pub fn fair(self) -> Self {
        self.mode(Mode::Fair)
    }

    /// Of each key only the newest message, in a [compacted](crate::StreamBuilder::compacted) stream: one that is superseded by a newer
    /// one when it would be handed out, or tried again, is done. At least the newest of each key is handed out, older ones too when the
    /// newer came after them. Any newer message counts, also one that is not for the group by its bindings. Default: no. An existing
    /// group takes it over when it is opened with it.
    ///
    /// ```no_run
    /// # async fn f(prices: sqlstreams::Stream<f64>) -> sqlstreams::Result<()> {
    /// let labels = prices.group("labels").newest_only(true).create_if_missing().await?;
    /// # Ok(()) }
    /// ```
    pub fn newest_only(mut self, newest_only: bool) -> Self {
        self.newest_only = Some(newest_only);
        self
    }

    /// Only messages that match this binding, or another one of the group's, are for it: see [`Binding`]. Without any, all are.
    /// An existing group that has others takes these over when it is opened with any, as by
    /// [`set_bindings`](Group::set_bindings).
    ///
    /// ```no_run
    /// # async fn f(orders: sqlstreams::Stream<u64>) -> sqlstreams::Result<()> {
    /// orders.group("receipts").bind("orders.*.created").bind("refunds.#").create_if_missing().await?;
    /// # Ok(()) }
    /// ```
    pub fn bind(mut self, binding: impl Into<Binding>) -> Self {
        self.bindings.get_or_insert_default().push(binding.into());
        self
    }

    /// Creates the group.
    ///
    /// # Errors
    /// [`GroupExists`](ErrorKind::GroupExists), a name or setting out of range, or the database's.
    pub async fn create(self) -> Result<Group<T, C>> {
        check_name("group", &self.name)?;
        let stream = &self.stream.inner;
        let queries = &stream.client.inner.queries;
        let after = match self.start {
            Start::Beginning => 0,
            Start::Id(id) => id.saturating_sub(1).max(0),
            Start::Latest => stream
                .client
                .query_one(&queries.stream_head, &[&stream.id], "find the latest message")
                .await?
                .get(0),
            Start::Time(at) => stream
                .client
                .query_one(
                    &queries.position_at,
                    &[&stream.id, &at],
                    "find the first message of that time",
                )
                .await?
                .get(0),
        };
        let settings = self.settings()?;
        let mode = self.mode.map(Mode::as_str);
        let bindings = self.bindings.as_deref().map(binding::to_json).transpose()?;
        let params: [&(dyn ToSql + Sync); 13] = [
            &stream.id,
            &self.name,
            &after,
            &settings.lease,
            &settings.max_attempts,
            &settings.backoff_base,
            &settings.backoff_factor,
            &settings.backoff_cap,
            &settings.max_in_flight,
            &settings.rate_limit,
            &bindings,
            &mode,
            &settings.newest_only,
        ];
        let id = stream
            .client
            .query_one(&queries.create_group, &params, "create the group")
            .await?
            .get(0);
        Ok(Group { stream: self.stream, id, name: self.name })
    }

    /// Opens the group, creating it if there is none of that name.
    ///
    /// # Errors
    /// As [`create`](Self::create) and [`open`](Self::open), but for "exists" and "unknown".
    pub async fn create_if_missing(self) -> Result<Group<T, C>> {
        if let Some((id, mode)) = self.find().await? {
            return self.opened(id, mode).await;
        }
        match self.clone().create().await {
            // Somebody else was faster.
            Err(e) if e.kind() == ErrorKind::GroupExists => self.open().await,
            created => created,
        }
    }

    /// Opens a group that exists.
    ///
    /// # Errors
    /// [`UnknownGroup`](ErrorKind::UnknownGroup), with the names that exist as its hint.
    pub async fn open(self) -> Result<Group<T, C>> {
        match self.find().await? {
            Some((id, mode)) => self.opened(id, mode).await,
            None => {
                let names: Vec<String> =
                    self.stream.groups().await?.into_iter().map(|g| g.group).collect();
                let what = format!(
                    "stream {} has no group {}",
                    shorten(self.stream.name()),
                    shorten(&self.name)
                );
                Err(Error::new(ErrorKind::UnknownGroup, what).with_hint(existing("Groups", &names)))
            }
        }
    }

    /// Its number and its mode, if it exists.
    async fn find(&self) -> Result<Option<(i64, Mode)>> {
        check_name("group", &self.name)?;
        let stream = &self.stream.inner;
        let rows = stream
            .client
            .query(
                &stream.client.inner.queries.find_group,
                &[&stream.id, &self.name],
                "find the group",
            )
            .await?;
        rows.first().map(|row| Ok((row.get(0), row.get::<_, &str>(7).parse()?))).transpose()
    }

    async fn opened(self, id: i64, found: Mode) -> Result<Group<T, C>> {
        let settings = self.settings()?;
        let group = Group { stream: self.stream, id, name: self.name };
        if settings != Settings::default() {
            group.alter(&settings).await?;
        }
        if let Some(bindings) = self.bindings {
            group.set_bindings(bindings).await?;
        }
        if let Some(mode) = self.mode
            && mode != found
        {
            group.set_mode(mode).await?;
        }
        Ok(group)
    }

    fn settings(&self) -> Result<Settings> {
        let out_of_range =
            |what: &str| Err(Error::new(ErrorKind::InvalidArgument, what.to_owned()));
        let max_attempts = self.max_attempts.or(self.retry.map(|policy| policy.max_attempts));
        let max_attempts = match max_attempts.map(i32::try_from) {
            None => None,
            Some(Ok(attempts @ 1..)) => Some(attempts),
            Some(_) => return out_of_range("max_attempts is 1 to 2147483647"),
        };
        if self.lease.is_some_and(|l| l < LEASE.0 || l > LEASE.1) {
            return out_of_range("a lease lasts 100 ms to 1 day");
        }
        if let Some(policy) = self.retry
            && (!(1.0..=1000.0).contains(&policy.backoff_factor)
                || policy.backoff_base > MOST_BACKOFF
                || policy.backoff_cap > MOST_BACKOFF)
        {
            return out_of_range(
                "backoff_factor is 1 to 1000, backoff_base and backoff_cap are at most 365 days",
            );
        }
        let max_in_flight = match self.max_in_flight.map(i32::try_from) {
            None => None,
            Some(Ok(messages)) => Some(messages),
            Some(Err(_)) => {
                return out_of_range("max_in_flight is 1 to 2147483647, or 0 for no limit");
            }
        };
        if self.rate_limit.is_some_and(|rate| rate != 0.0 && !(1e-6..=1e9).contains(&rate)) {
            return out_of_range(
                "rate_limit is 0.000001 to 1000000000 messages per second, or 0 for no limit",
            );
        }
        Ok(Settings {
            lease: self.lease.map(|lease| lease.as_secs_f64()),
            max_attempts,
            backoff_base: self.retry.map(|policy| policy.backoff_base.as_secs_f64()),
            backoff_factor: self.retry.map(|policy| policy.backoff_factor),
            backoff_cap: self.retry.map(|policy| policy.backoff_cap.as_secs_f64()),
            max_in_flight,
            rate_limit: self.rate_limit,
            transactional: None,
            newest_only: self.newest_only,
        })
    }
}

/// A group's settings as the protocol takes them: seconds, and `None` for what is to stay as it is.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Settings {
    pub(super) lease: Option<f64>,
    pub(super) max_attempts: Option<i32>,
    pub(super) backoff_base: Option<f64>,
    pub(super) backoff_factor: Option<f64>,
    pub(super) backoff_cap: Option<f64>,
    pub(super) max_in_flight: Option<i32>,
    pub(super) rate_limit: Option<f64>,
    pub(super) transactional: Option<bool>,
    pub(super) newest_only: Option<bool>,
}

impl<T: Send + 'static, C: Codec<T>> GroupBuilder<T, C> {
    /// A consumer of the group, which is created if it is missing; see [`ConsumerBuilder`].
    pub fn consumer(self) -> ConsumerBuilder<T, C> {
        ConsumerBuilder::new(self)
    }
}
