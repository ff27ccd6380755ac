//! Streams: creating, finding, describing and dropping them.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;

use crate::client::Client;
use crate::error::{Error, ErrorKind, Result};
use crate::group::GroupBuilder;
use crate::message::{Message, RawMessage};
use crate::name::{check_name, shorten};
use crate::payload::{Codec, Json, Payload, PayloadType};
use crate::produce::{Keys, Producer};
use crate::queries::StreamQueries;
use crate::retention::{Retention, RetentionHold};
use crate::wake::Bell;

/// A stream of messages of type `T`, written and read by codec `C`.
///
/// Cheap to clone. From [`Client::stream`].
pub struct Stream<T, C = Json> {
    pub(crate) inner: Arc<StreamInner>,
    pub(crate) types: PhantomData<fn() -> (T, C)>,
}

#[derive(Debug)]
pub(crate) struct StreamInner {
    pub(crate) client: Client,
    pub(crate) id: i64,
    pub(crate) name: String,
    pub(crate) payload_type: PayloadType,
    pub(crate) partition_size: i64,
    pub(crate) compacted: bool,
    pub(crate) queries: StreamQueries,
    /// The id from which on partitions are looked after again.
    pub(crate) next_upkeep: AtomicI64,
    pub(crate) keys: Keys,
}

impl StreamInner {
    /// Wakes consumers, here and elsewhere.
    pub(crate) fn ring(&self) {
        self.committed(false);
    }

    /// Messages were committed that are delayed, but not for long.
    pub(crate) fn delayed_some(&self) {
        // The stream's number, below zero: see `Rung`.
        self.client.inner.watcher.rang(-self.id);
        Bell::ring(&self.client, -self.id);
    }

    /// Something was committed; `rung`: and rung for elsewhere.
    pub(crate) fn committed(&self, rung: bool) {
        self.client.inner.watcher.rang(self.id);
        if !rung {
            Bell::ring(&self.client, self.id);
        }
    }
}

impl<T, C> Clone for Stream<T, C> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), types: PhantomData }
    }
}

impl<T, C> std::fmt::Debug for Stream<T, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("id", &self.inner.id)
            .field("name", &self.inner.name)
            .finish()
    }
}

/// A stream that is to be opened or created; from [`Client::stream`].
#[must_use]
pub struct StreamBuilder<T, C = Json> {
    client: Client,
    name: String,
    payload_type: Option<PayloadType>,
    partition_size: i64,
    notify: bool,
    idempotency_window: Option<Duration>,
    compacted: Option<bool>,
    retention: Retention,
    types: PhantomData<fn() -> (T, C)>,
}

/// What is known about a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamInfo {
    /// Its number: its tables are `message_log_<id>` and so on.
    pub id: i64,
    /// Its name.
    pub name: String,
    /// How payloads are stored.
    pub payload_type: PayloadType,
    /// Ids per partition of the log.
    pub partition_size: i64,
    /// When it was created.
    pub created_at: SystemTime,
    /// The last id drawn, 0 if none was. An upper bound of the number of messages.
    pub head: i64,
    /// How many consumer groups it has.
    pub groups: i64,
    /// Whether every insert wakes the consumers from inside its transaction; see [`StreamBuilder::notify`].
    pub notify: bool,
    /// How long idempotency keys are remembered.
    pub idempotency_window: Duration,
    /// Whether only the newest message of each key is kept for good; see [`StreamBuilder::compacted`].
    pub compacted: bool,
    /// How long its messages are kept.
    pub retention: Retention,
    /// The lowest id that is kept: the log begins here, or soon will.
    pub first_id: i64,
    /// What keeps messages that are to go from going.
    pub hold: Option<RetentionHold>,
    /// How long groups live that nobody consumes; see [`Stream::set_group_expiry`].
    pub group_expiry: Option<Duration>,
}

impl<T, C> StreamBuilder<T, C> {
    pub(crate) fn new(client: Client, name: String, types: PhantomData<fn() -> (T, C)>) -> Self {
        Self {
            client,
            name,
            payload_type: None,
            partition_size: 1_000_000,
            notify: false,
            idempotency_window: None,
            compacted: None,
            retention: Retention::forever(),
            types,
        }
    }

    /// Reads and writes payloads with another codec.
    pub fn codec<D: Codec<T>>(self) -> StreamBuilder<T, D> {
        StreamBuilder {
            client: self.client,
            name: self.name,
            payload_type: self.payload_type,
            partition_size: self.partition_size,
            notify: self.notify,
            idempotency_window: self.idempotency_window,
            compacted: self.compacted,
            retention: self.retention,
            types: PhantomData,
        }
    }

    /// How a new stream stores payloads; an existing one has to store them so. Default for a new one: the codec's first.
    pub fn payload_type(mut self, payload_type: PayloadType) -> Self {
        self.payload_type = Some(payload_type);
        self
    }

    /// Whether every insert into a new stream wakes its consumers from inside its transaction: for producers that are plain SQL,
    /// or that send in transactions of their own ([`send_in`](Stream::send_in)). Default: no; consumers find such messages by
    /// polling, within a second. A [`Producer`] wakes them in any case. [`Stream::set_notify`] changes it later.
    ///
    /// Commits that notify follow one another in PostgreSQL, which limits how many there can be per second.
    pub fn notify(mut self, notify: bool) -> Self {
        self.notify = notify;
        self
    }

    /// How long a new stream remembers the [idempotency keys](crate::Outgoing::idempotency_key) of its messages, 5 minutes to
    /// 365 days. Default: 24 hours. [`Stream::set_idempotency_window`] changes it later.
    pub fn idempotency_window(mut self, window: Duration) -> Self {
        self.idempotency_window = Some(window);
        self
    }

    /// Whether a new stream keeps only the newest message of each key for good; an existing one has to be as asked for. Default
    /// for a new one: no. It cannot be changed later.
    ///
    /// All messages of a compacted stream have a key. [`Stream::latest`] and [`Stream::current`] look its values up, an
    /// [`Outgoing::tombstone`](crate::Outgoing::tombstone) removes a key.
    pub fn compacted(mut self, compacted: bool) -> Self {
        self.compacted = Some(compacted);
        self
    }

    /// How long a new stream keeps its messages. Default: for ever. [`Stream::set_retention`] changes it later.
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Ids per partition of a new stream's log, 1,000 to 1,000,000,000. Default: 1,000,000.
    pub fn partition_size(mut self, ids: i64) -> Self {
        self.partition_size = ids;
        self
    }
}

impl<T, C: Codec<T>> StreamBuilder<T, C> {
    /// Creates the stream.
    ///
    /// # Errors
    /// [`StreamExists`](ErrorKind::StreamExists), a name or setting out of range, or the database's.
    pub async fn create(self) -> Result<Stream<T, C>> {
        check_name("stream", &self.name)?;
        let payload_type = self
            .payload_type
            .unwrap_or_else(|| C::payload_types().first().copied().unwrap_or_default());
        self.check_codec(payload_type)?;
        let create = &self.client.inner.queries.create_stream;
        let window = self.idempotency_window.map(seconds);
        let compacted = self.compacted.unwrap_or_default();
        let kept = self.retention.params();
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 12] = [
            &self.name,
            &payload_type.as_str(),
            &self.partition_size,
            &self.notify,
            &window,
            &compacted,
            &kept.age,
            &kept.bytes,
            &kept.count,
            &kept.resolved,
            &kept.drop_unread,
            &kept.dead,
        ];
        let id = self.client.query_one(create, &params, "create the stream").await?.get(0);
        let partition_size = self.partition_size;
        Ok(self.into_stream(id, payload_type, partition_size, compacted))
    }

    /// Opens the stream, creating it if there is none of that name.
    ///
    /// # Errors
    /// As [`create`](Self::create) and [`open`](Self::open), but for "exists" and "unknown".
    pub async fn create_if_missing(self) -> Result<Stream<T, C>> {
        match self.find().await? {
            Some(found) => self.opened(found),
            None => {
                let again = Self {
                    client: self.client.clone(),
                    name: self.name.clone(),
                    retention: self.retention.clone(),
                    types: PhantomData,
                    ..self
                };
                match self.create().await {
                    // Somebody else was faster.
                    Err(e) if e.kind() == ErrorKind::StreamExists => again.open().await,
                    created => created,
                }
            }
        }
    }

    /// Opens a stream that exists.
    ///
    /// # Errors
    /// [`UnknownStream`](ErrorKind::UnknownStream), with the names that exist as its hint;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) when it stores payloads in another way than asked for.
    pub async fn open(self) -> Result<Stream<T, C>> {
        match self.find().await? {
            Some(found) => self.opened(found),
            None => {
                let names: Vec<String> =
                    self.client.streams().await?.into_iter().map(|s| s.name).collect();
                Err(Error::new(
                    ErrorKind::UnknownStream,
                    format!("there is no stream {}", shorten(&self.name)),
                )
                .with_hint(existing("Streams", &names)))
            }
        }
    }

    async fn find(&self) -> Result<Option<Row>> {
        check_name("stream", &self.name)?;
        let mut rows = self
            .client
            .query(&self.client.inner.queries.find_stream, &[&self.name], "find the stream")
            .await?;
        Ok(rows.pop())
    }

    fn opened(self, found: Row) -> Result<Stream<T, C>> {
        let payload_type: PayloadType = found.get::<_, String>(1).parse()?;
        if let Some(asked) = self.payload_type.filter(|asked| *asked != payload_type) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "stream {} stores its payloads as {payload_type}, not as {asked}",
                    shorten(&self.name)
                ),
            )
            .with_hint("A stream keeps the payload type it was created with."));
        }
        self.check_codec(payload_type)?;
        let compacted: bool = found.get(4);
        if self.compacted.is_some_and(|asked| asked != compacted) {
            let is = if compacted { "is" } else { "is not" };
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("stream {} {is} compacted", shorten(&self.name)),
            )
            .with_hint("A stream is compacted or not from its creation on."));
        }
        let partition_size = found.get(2);
        Ok(self.into_stream(found.get(0), payload_type, partition_size, compacted))
    }

    fn check_codec(&self, payload_type: PayloadType) -> Result<()> {
        if C::payload_types().contains(&payload_type) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("the codec cannot read or write {payload_type}, as which stream {} stores its payloads", shorten(&self.name)),
        )
        .with_hint("Open the stream with another codec."))
    }

    fn into_stream(
        self,
        id: i64,
        payload_type: PayloadType,
        partition_size: i64,
        compacted: bool,
    ) -> Stream<T, C> {
        let queries = StreamQueries::new(&self.client.inner.schema, id, payload_type);
        Stream {
            inner: Arc::new(StreamInner {
                client: self.client,
                id,
                name: self.name,
                payload_type,
                partition_size,
                compacted,
                queries,
                next_upkeep: AtomicI64::new(0),
                keys: Keys::default(),
            }),
            types: PhantomData,
        }
    }
}

impl<T, C> Stream<T, C> {
    /// Its number: its tables are `message_log_<id>` and so on.
    pub fn id(&self) -> i64 {
        self.inner.id
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// How it stores payloads.
    pub fn payload_type(&self) -> PayloadType {
        self.inner.payload_type
    }

    /// A consumer group of this stream by its name; see [`GroupBuilder`]. Nothing is sent yet.
    pub fn group(&self, name: impl Into<String>) -> GroupBuilder<T, C> {
        GroupBuilder::new(self.clone(), name.into())
    }

    /// What is known about the stream now.
    ///
    /// # Errors
    /// [`UnknownStream`](ErrorKind::UnknownStream) when it was dropped meanwhile.
    pub async fn info(&self) -> Result<StreamInfo> {
        let client = &self.inner.client;
        let rows = client
            .query(&client.inner.queries.list_streams, &[&Some(self.name())], "describe the stream")
            .await?;
        match rows.iter().map(StreamInfo::from_row).next() {
            Some(Ok(info)) if info.id == self.inner.id => Ok(info),
            Some(Err(e)) => Err(e),
            _ => Err(Error::new(
                ErrorKind::UnknownStream,
                format!("stream {} was dropped", shorten(self.name())),
            )),
        }
    }

    /// Wakes the stream's consumers: after the commit of a transaction of one's own in which messages were sent
    /// ([`send_in`](Self::send_in)). A hint, which nobody waits for: without it they are found by polling, within a second.
    pub fn ring(&self) {
        self.inner.ring();
        self.inner.delayed_some();
    }

    /// Whether every insert wakes the consumers from inside its transaction; see [`StreamBuilder::notify`].
    ///
    /// # Errors
    /// The database's: it waits up to 3 s for transactions that write to the stream.
    pub async fn set_notify(&self, notify: bool) -> Result<()> {
        self.alter(Some(notify), None, None).await
    }

    /// How long the stream remembers the idempotency keys of its messages; see [`StreamBuilder::idempotency_window`]. Keys that
    /// were forgotten under a shorter window stay so.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for one out of range, or the database's.
    pub async fn set_idempotency_window(&self, window: Duration) -> Result<()> {
        self.alter(None, Some(window), None).await
    }

    /// How long groups of the stream live that nobody consumes, 1 hour to 10 years; `None`, the default: for ever. Then [maintenance](crate::Maintenance) drops them, with
    /// their dead letters. At three quarters of the time their status says so ([`GroupStatus::expires_at`](crate::GroupStatus::expires_at)), and table `audit`.
    ///
    /// Claims and settlements are signs of life, also claims that get nothing, and so is a consumer of this crate that runs for a few seconds, whether there is anything to consume or not. Paused groups do not
    /// expire. No group is dropped sooner than so long after this call.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a time out of range, or the database's.
    pub async fn set_group_expiry(&self, after: Option<Duration>) -> Result<()> {
        let client = &self.inner.client;
        let query = &client.inner.queries.expire_groups_after;
        let after = after.map(seconds);
        client.query(query, &[&self.inner.id, &after], "change the stream").await?;
        Ok(())
    }

    /// How long the stream keeps its messages, from now on; it replaces what was set before. What is gone does not come back.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a setting out of range, or the database's.
    pub async fn set_retention(&self, retention: &Retention) -> Result<()> {
        self.alter(None, None, Some(retention)).await
    }

    async fn alter(
        &self,
        notify: Option<bool>,
        window: Option<Duration>,
        retention: Option<&Retention>,
    ) -> Result<()> {
        let client = &self.inner.client;
        let alter = &client.inner.queries.alter_stream;
        let window = window.map(seconds);
        let kept = retention.map(Retention::params).unwrap_or_default();
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 9] = [
            &self.inner.id,
            &notify,
            &window,
            &kept.age,
            &kept.bytes,
            &kept.count,
            &kept.resolved,
            &kept.drop_unread,
            &kept.dead,
        ];
        client.query(alter, &params, "change the stream").await?;
        Ok(())
    }

    /// Drops the stream with all its messages, groups and exceptions. There is no way back.
    ///
    /// Waits for transactions that use the stream; consumers that run end with
    /// [`UnknownStream`](ErrorKind::UnknownStream).
    ///
    /// # Errors
    /// [`UnknownStream`](ErrorKind::UnknownStream) when it is gone already, or the database's.
    pub async fn drop_stream(self) -> Result<()> {
        let client = &self.inner.client;
        client
            .query(&client.inner.queries.drop_stream, &[&self.inner.id], "drop the stream")
            .await?;
        Ok(())
    }
}

impl<T, C: Codec<T>> Stream<T, C> {
    /// Messages of the log by their ids, lowest first, whatever the groups have done with them. Ids for which there is no
    /// message are left out.
    ///
    /// # Errors
    /// [`InvalidMessage`](ErrorKind::InvalidMessage) for a payload that cannot be decoded, or the database's.
    pub async fn read(&self, ids: &[i64]) -> Result<Vec<Message<T>>> {
        let rows = self
            .inner
            .client
            .query(&self.inner.queries.read_messages, &[&ids], "read messages")
            .await?;
        rows.iter().map(read_message::<T, C>).collect()
    }
}

/// A message of the log from a row with its columns.
pub(crate) fn read_message<T, C: Codec<T>>(row: &Row) -> Result<Message<T>> {
    let payload = row.get::<_, Option<Payload>>(5);
    let raw = RawMessage {
        id: row.get(0),
        key: row.get(1),
        routing_key: row.get(2),
        headers: row.get(3),
        produced_at: row.get(4),
        tombstone: payload.is_none(),
        payload: payload.into(),
        expires: None,
        lane: None,
        superseded: false,
    };
    let id = raw.id;
    raw.decode::<T, C>()
        .map_err(|reason| Error::new(ErrorKind::InvalidMessage, format!("message {id}: {reason}")))
}

impl<T: Send + 'static, C: Codec<T>> Stream<T, C> {
    /// A producer for this stream, with its own queue and task: make one and clone it.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn producer(&self) -> Producer<T, C> {
        Producer::new(self.clone())
    }
}

impl StreamInfo {
    pub(crate) fn from_row(row: &Row) -> Result<Self> {
        Ok(Self {
            id: row.get(0),
            name: row.get(1),
            payload_type: row.get::<_, String>(2).parse()?,
            partition_size: row.get(3),
            created_at: row.get(4),
            head: row.get(5),
            groups: row.get(6),
            notify: row.get(7),
            idempotency_window: Duration::try_from_secs_f64(row.get(8)).unwrap_or_default(),
            compacted: row.get(9),
            retention: Retention::from_row(row, 10),
            first_id: row.get(16),
            hold: RetentionHold::from_row(row, 17)?,
            group_expiry: row
                .get::<_, Option<f64>>(22)
                .and_then(|after| Duration::try_from_secs_f64(after).ok()),
        })
    }
}

/// As far as an interval goes; what is out of range stays so.
pub(crate) fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64().min(1e12)
}

/// "Streams that exist: a, b", for hints.
pub(crate) fn existing(what: &str, names: &[String]) -> String {
    match names {
        [] => format!("{what} that exist: none yet."),
        names => {
            let more = if names.len() > 10 { ", …" } else { "" };
            let first: Vec<String> = names.iter().take(10).map(|n| shorten(n)).collect();
            format!("{what} that exist: {}{more}.", first.join(", "))
        }
    }
}
