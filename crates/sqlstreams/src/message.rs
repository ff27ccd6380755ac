//! Messages as they come out of a stream and as they go in.

use std::time::{Duration, Instant, SystemTime};

use serde_json::{Map, Value};
use tokio_postgres::Row;

use crate::error::{Error, ErrorKind, Result};
use crate::outcome::Verdict;
use crate::payload::{Codec, MAX_PAYLOAD_BYTES, Payload, PayloadType, Raw};

/// The headers of a message: a JSON object.
pub type Headers = Map<String, Value>;

/// The longest key, in bytes of UTF-8.
pub const MAX_KEY_BYTES: usize = 1024;

/// The longest routing key, in bytes of UTF-8.
pub const MAX_ROUTING_KEY_BYTES: usize = 255;

/// The longest idempotency key, in bytes of UTF-8.
pub const MAX_IDEMPOTENCY_KEY_BYTES: usize = 1024;

/// How far ahead a message can be put off: about 10,000 years.
const MOST_AHEAD: Duration = Duration::from_secs(10_000 * 365 * 24 * 3600);

/// A message of a stream.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Message<T> {
    /// Its place in the stream. Grows in the order in which the messages were inserted; rolled-back inserts leave holes.
    pub id: i64,
    /// What it is about, for ordering and compaction.
    pub key: Option<String>,
    /// What groups select it by.
    pub routing_key: Option<String>,
    /// Headers, empty when it was sent without.
    pub headers: Headers,
    /// When it was inserted, by the database's clock.
    pub produced_at: SystemTime,
    /// Whether it is a [tombstone](Outgoing::tombstone), sent without a payload.
    pub tombstone: bool,
    /// What was sent; of a tombstone, what the [codec](Codec::tombstone) makes of it.
    pub payload: T,
}

/// A message to send: a payload and what goes with it.
///
/// ```
/// let message = sqlstreams::Outgoing::new(&"hello").key("greetings");
/// ```
#[derive(Debug)]
#[must_use]
pub struct Outgoing<'a, T> {
    /// None for a tombstone.
    payload: Option<&'a T>,
    meta: Meta,
}

// Whatever the payload is: only a reference to it is copied.
impl<T> Clone for Outgoing<'_, T> {
    fn clone(&self) -> Self {
        Self { payload: self.payload, meta: self.meta.clone() }
    }
}

/// What goes with a payload.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meta {
    pub(crate) key: Option<String>,
    pub(crate) routing_key: Option<String>,
    pub(crate) headers: Option<Headers>,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) deliver: Option<When>,
    pub(crate) expires: Option<When>,
    /// 0: the key has no value.
    pub(crate) expected: Option<i64>,
}

/// A point of time, by the database's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    At(SystemTime),
    After(Duration),
}

impl<'a, T> Outgoing<'a, T> {
    /// A message with nothing but a payload.
    pub fn new(payload: &'a T) -> Self {
        Self { payload: Some(payload), meta: Meta::default() }
    }

    /// A message without payload: from then on `key` has no value. Only in a [compacted](crate::StreamBuilder::compacted)
    /// stream. It is no JSON `null` and no empty text: those are values.
    pub fn tombstone(key: impl Into<String>) -> Self {
        Self { payload: None, meta: Meta { key: Some(key.into()), ..Meta::default() } }
    }

    /// What the message is about: at most [`MAX_KEY_BYTES`], without NUL.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.meta.key = Some(key.into());
        self
    }

    /// What groups select the message by, words with dots between them: at most [`MAX_ROUTING_KEY_BYTES`], without NUL. See
    /// [`Binding`](crate::Binding).
    pub fn routing_key(mut self, routing_key: impl Into<String>) -> Self {
        self.meta.routing_key = Some(routing_key.into());
        self
    }

    /// Headers, without NUL.
    pub fn headers(mut self, headers: Headers) -> Self {
        self.meta.headers = Some(headers);
        self
    }

    /// What the message is known by: of all that are sent with the same key, the stream stores the first, for as long as its
    /// [window](crate::StreamBuilder::idempotency_window) lasts, and answers the others with its id; see
    /// [`Receipt::duplicate`](crate::Receipt::duplicate). 1 to [`MAX_IDEMPOTENCY_KEY_BYTES`], without NUL.
    ///
    /// While the first one's transaction is open, the others wait for its end.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.meta.idempotency_key = Some(key.into());
        self
    }

    /// Keeps the message back for so long, by the database's clock: it waits beside the log, as long as you like, and gets its
    /// place in it then. Nothing is delayed by nothing. See [`Receipt::delayed`](crate::Receipt::delayed).
    pub fn delay(mut self, delay: Duration) -> Self {
        self.meta.deliver = Some(When::After(delay));
        self
    }

    /// Keeps the message back until then, by the database's clock, as [`delay`](Self::delay) does. A time that has been
    /// delays nothing.
    pub fn deliver_at(mut self, at: SystemTime) -> Self {
        self.meta.deliver = Some(When::At(at));
        self
    }

    /// After so long nobody gets the message any more, by the database's clock; counted from when it is
    /// [due](Self::delay). A handler that has it by then keeps it. Consumers count what expired
    /// ([`Consumed::expired`](crate::Consumed::expired)).
    pub fn expires_in(mut self, time: Duration) -> Self {
        self.meta.expires = Some(When::After(time));
        self
    }

    /// From then on nobody gets the message any more, as with [`expires_in`](Self::expires_in).
    pub fn expires_at(mut self, at: SystemTime) -> Self {
        self.meta.expires = Some(When::At(at));
        self
    }

    /// Stores the message only if the key's [current value](crate::Stream::latest) is the message of this id, or with `None`
    /// only if the key has none; else nothing of the batch is stored, and the error is a
    /// [`Conflict`](crate::ErrorKind::Conflict) with the [actual id](crate::Error::latest_id). So what was read can be changed and
    /// written back, and nothing that another wrote meanwhile is lost. Only in a [compacted](crate::StreamBuilder::compacted)
    /// stream.
    ///
    /// **All writers of a key must use it**: it does not hold up those that do not. The others that use it wait until the
    /// transaction ends. Such a message cannot be delayed and has no idempotency key: sent twice, it is refused the second time.
    pub fn expect_latest(mut self, id: impl Into<Option<i64>>) -> Self {
        self.meta.expected = Some(id.into().unwrap_or(0));
        self
    }

    /// For a stream that stores payloads so and is compacted or not.
    pub(crate) fn encode<C: Codec<T>>(
        self,
        payload_type: PayloadType,
        compacted: bool,
    ) -> Result<Encoded> {
        if compacted && self.meta.key.is_none() {
            return Err(invalid("the stream is compacted, and the message has no key".to_owned())
                .with_hint("Give it one: of each key the newest message is kept."));
        }
        if !compacted && self.payload.is_none() {
            return Err(invalid("the stream is not compacted and takes no tombstones".to_owned())
                .with_hint("Whether a stream is compacted is said when it is created."));
        }
        if self.meta.expected.is_some() {
            if !compacted {
                return Err(invalid("the stream is not compacted: there is no latest".to_owned())
                    .with_hint("Whether a stream is compacted is said when it is created."));
            }
            if self.meta.deliver.is_some() || self.meta.idempotency_key.is_some() {
                return Err(invalid(
                    "a message that expects what is latest is neither delayed nor has it an idempotency key".to_owned(),
                )
                .with_hint("Sent twice, it is refused the second time."));
            }
        }
        Encoded::new::<T, C>(self.payload, self.meta, payload_type)
    }
}

/// A message in the form in which it is inserted, known to be storable but for the syntax of its JSON.
#[derive(Debug, Clone)]
pub(crate) struct Encoded {
    pub(crate) key: Option<String>,
    pub(crate) routing_key: Option<String>,
    pub(crate) headers: Option<String>,
    /// None for a tombstone.
    pub(crate) payload: Option<Payload>,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) deliver: Option<When>,
    pub(crate) expires: Option<When>,
    pub(crate) expected: Option<i64>,
}

impl When {
    fn check(self, what: &str) -> Result<Self> {
        let ahead = match self {
            Self::After(duration) => duration,
            // What has been has been.
            Self::At(at) if at < SystemTime::UNIX_EPOCH => {
                return Ok(Self::At(SystemTime::UNIX_EPOCH));
            }
            Self::At(at) => at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
        };
        match ahead <= MOST_AHEAD {
            true => Ok(self),
            false => Err(invalid(format!("the {what} is more than 10,000 years ahead"))),
        }
    }

    /// As the SQL functions take it: a time, or seconds.
    pub(crate) fn at(self) -> Option<SystemTime> {
        match self {
            Self::At(at) => Some(at),
            Self::After(_) => None,
        }
    }

    pub(crate) fn after(self) -> Option<f64> {
        match self {
            Self::At(_) => None,
            Self::After(duration) => Some(duration.as_secs_f64()),
        }
    }
}

impl Encoded {
    pub(crate) fn new<T, C: Codec<T>>(
        payload: Option<&T>,
        meta: Meta,
        payload_type: PayloadType,
    ) -> Result<Self> {
        let payload = payload.map(C::encode).transpose();
        let payload = payload
            .map_err(|e| invalid(format!("the payload cannot be encoded: {e}")).with_source(e))?;
        if let Some(payload) = &payload {
            check_payload(payload, payload_type)?;
        }
        check_text("key", meta.key.as_deref(), MAX_KEY_BYTES)?;
        check_text("routing key", meta.routing_key.as_deref(), MAX_ROUTING_KEY_BYTES)?;
        let idempotency_key = meta.idempotency_key.as_deref();
        check_text("idempotency key", idempotency_key, MAX_IDEMPOTENCY_KEY_BYTES)?;
        if idempotency_key.is_some_and(str::is_empty) {
            return Err(invalid("the idempotency key is empty".to_owned()));
        }
        let headers = meta.headers.map(Value::Object);
        if headers.as_ref().is_some_and(holds_nul) {
            return Err(invalid(
                "a header holds the character U+0000, which PostgreSQL cannot store".to_owned(),
            ));
        }
        Ok(Self {
            key: meta.key,
            routing_key: meta.routing_key,
            headers: headers.map(|h| h.to_string()),
            payload: payload.map(Payload),
            idempotency_key: meta.idempotency_key,
            deliver: meta.deliver.map(|when| when.check("time of delivery")).transpose()?,
            expires: meta.expires.map(|when| when.check("time to expire")).transpose()?,
            expected: meta.expected,
        })
    }

    /// Whether a plain INSERT can say all of it.
    pub(crate) fn is_plain(&self) -> bool {
        self.idempotency_key.is_none()
            && self.deliver.is_none()
            && self.expires.is_none()
            && self.expected.is_none()
    }

    /// Whether it leaves a row behind that goes with the stream's window.
    pub(crate) fn leaves_key(&self) -> bool {
        self.idempotency_key.is_some() || self.deliver.is_some()
    }

    /// About how much it takes on the wire.
    pub(crate) fn bytes(&self) -> usize {
        let len = |s: &Option<String>| s.as_ref().map_or(0, String::len);
        let rest = len(&self.key) + len(&self.routing_key) + len(&self.headers);
        self.payload.as_ref().map_or(0, |payload| payload.0.len())
            + rest
            + len(&self.idempotency_key)
            + 32
    }
}

/// A message as it comes from the server.
#[derive(Debug)]
pub(crate) struct RawMessage {
    pub(crate) id: i64,
    pub(crate) key: Option<String>,
    pub(crate) routing_key: Option<String>,
    pub(crate) headers: Option<String>,
    pub(crate) produced_at: SystemTime,
    pub(crate) tombstone: bool,
    pub(crate) payload: Body,
    /// When it expires, by the local clock: not later than by the server's.
    pub(crate) expires: Option<Instant>,
    /// In which of the lanes of its lease it is, where that has some.
    pub(crate) lane: Option<i16>,
    /// A newer message of its key has come, and the group wants only that.
    pub(crate) superseded: bool,
}

/// A payload as it came.
#[derive(Debug)]
pub(crate) enum Body {
    Owned(Vec<u8>),
    /// A column of a row, where it is without being copied.
    Row(Row, usize),
}

impl Body {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Row(row, column) => {
                row.get::<_, Option<Raw<'_>>>(*column).map_or(&[], |raw| raw.0)
            }
        }
    }
}

impl From<Option<Payload>> for Body {
    fn from(payload: Option<Payload>) -> Self {
        Self::Owned(payload.unwrap_or_default().0)
    }
}

impl RawMessage {
    /// How it is settled without a handler, if no handler may have it any more.
    pub(crate) fn passed_over(&self) -> Option<Verdict> {
        if self.expires.is_some_and(|at| at <= Instant::now()) {
            Some(Verdict::passed_over(Verdict::EXPIRED))
        } else {
            self.superseded.then(|| Verdict::passed_over(Verdict::SUPERSEDED))
        }
    }

    /// The message, or why it cannot be decoded.
    pub(crate) fn decode<T, C: Codec<T>>(self) -> Result<Message<T>, String> {
        let headers = match self.headers.as_deref().map(serde_json::from_str::<Headers>) {
            None => Headers::new(),
            Some(Ok(headers)) => headers,
            Some(Err(e)) => return Err(format!("the headers cannot be decoded: {e}")),
        };
        let payload = match self.tombstone {
            true => C::tombstone().map_err(|e| format!("the tombstone cannot be decoded: {e}"))?,
            false => C::decode(self.payload.bytes())
                .map_err(|e| format!("the payload cannot be decoded: {e}"))?,
        };
        Ok(Message {
            id: self.id,
            key: self.key,
            routing_key: self.routing_key,
            headers,
            produced_at: self.produced_at,
            tombstone: self.tombstone,
            payload,
        })
    }
}

fn check_payload(payload: &[u8], payload_type: PayloadType) -> Result<()> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        return Err(Error::new(
            ErrorKind::TooLarge,
            format!(
                "a payload of {} bytes is above the limit of {MAX_PAYLOAD_BYTES} bytes (64 MiB)",
                payload.len()
            ),
        )
        .with_hint("Store the data elsewhere and send a reference to it."));
    }
    if payload_type == PayloadType::Bytea {
        return Ok(());
    }
    if let Err(e) = std::str::from_utf8(payload) {
        return Err(invalid(format!(
            "the payload is not UTF-8: byte {} is wrong",
            e.valid_up_to()
        )));
    }
    // `contains` looks at many bytes at once, unlike `position`.
    if payload.contains(&0) {
        let at = payload.iter().position(|&b| b == 0).unwrap_or_default();
        return Err(invalid(format!(
            "the payload holds a NUL at byte {at}, which {payload_type} cannot store"
        )));
    }
    Ok(())
}

fn check_text(what: &str, text: Option<&str>, limit: usize) -> Result<()> {
    match text {
        Some(t) if t.len() > limit => {
            Err(invalid(format!("the {what} has {} bytes, above the limit of {limit}", t.len())))
        }
        Some(t) if t.contains('\0') => {
            Err(invalid(format!("the {what} holds a NUL, which PostgreSQL cannot store")))
        }
        _ => Ok(()),
    }
}

/// jsonb stores every character but U+0000. Not recursive: headers come from callers and may be nested at will.
pub(crate) fn holds_nul(value: &Value) -> bool {
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        match value {
            Value::String(s) if s.contains('\0') => return true,
            Value::Array(items) => open.extend(items),
            Value::Object(map) => {
                if map.keys().any(|k| k.contains('\0')) {
                    return true;
                }
                open.extend(map.values());
            }
            _ => {}
        }
    }
    false
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidMessage, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::{Bytes, Json};

    fn encode(payload: &[u8], payload_type: PayloadType) -> Result<Encoded> {
        Outgoing::new(&payload.to_vec()).encode::<Bytes>(payload_type, false)
    }

    #[test]
    fn nul_and_broken_utf8_are_refused_where_they_cannot_be_stored() {
        assert!(encode(b"a\0b", PayloadType::Bytea).is_ok());
        assert!(encode(b"a\0b", PayloadType::Text).is_err());
        assert!(encode(b"\xff", PayloadType::Json).is_err());
    }

    #[test]
    fn an_escaped_nul_in_json_is_kept_as_it_is() {
        let payload = br#"{"a":"\u0000","b":"\\u0000"}"#;
        assert_eq!(encode(payload, PayloadType::Json).unwrap().payload.unwrap().0, payload);
    }

    #[test]
    fn limits_name_themselves() {
        let long = "x".repeat(MAX_KEY_BYTES + 1);
        let error =
            Outgoing::new(&1).key(long).encode::<Json>(PayloadType::Json, false).unwrap_err();
        assert!(error.to_string().contains("1025 bytes"), "{error}");
        let error = encode(&vec![b'x'; MAX_PAYLOAD_BYTES + 1], PayloadType::Bytea).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLarge);
    }

    #[test]
    fn nul_deep_in_headers_is_found() {
        let mut headers = Headers::new();
        headers.insert("a".into(), serde_json::json!([{"b": ["\0"]}]));
        assert!(
            Outgoing::new(&1).headers(headers).encode::<Json>(PayloadType::Json, false).is_err()
        );
    }
}
