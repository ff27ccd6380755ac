//! Payloads: the column type a stream stores them as, and how Rust values become payloads and back.

use std::cell::Cell;
use std::error::Error as StdError;
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use bytes::BytesMut;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use crate::error::{Error, ErrorKind, Result};

/// The largest payload that a producer sends, in bytes: 64 MiB.
pub const MAX_PAYLOAD_BYTES: usize = 64 * 1024 * 1024;

/// How a stream stores payloads; chosen when the stream is created and never changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PayloadType {
    /// JSON text, checked and kept byte for byte. The default: cheaper to write than `Jsonb`.
    #[default]
    Json,
    /// JSON in PostgreSQL's decomposed form: white space, key order and duplicate keys are lost, SQL operators are fast.
    /// Does not take the character U+0000.
    Jsonb,
    /// UTF-8 text without U+0000.
    Text,
    /// Any bytes.
    Bytea,
}

impl PayloadType {
    /// The name of the PostgreSQL type.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Jsonb => "jsonb",
            Self::Text => "text",
            Self::Bytea => "bytea",
        }
    }

    pub(crate) fn array_type(self) -> Type {
        match self {
            Self::Json => Type::JSON_ARRAY,
            Self::Jsonb => Type::JSONB_ARRAY,
            Self::Text => Type::TEXT_ARRAY,
            Self::Bytea => Type::BYTEA_ARRAY,
        }
    }
}

impl fmt::Display for PayloadType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PayloadType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "json" => Ok(Self::Json),
            "jsonb" => Ok(Self::Jsonb),
            "text" => Ok(Self::Text),
            "bytea" => Ok(Self::Bytea),
            other => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("unknown payload type {other:?}"),
            )
            .with_hint("Choose json, jsonb, text or bytea.")),
        }
    }
}

/// Turns values of `T` into payloads and back. [`Json`], [`Text`] and [`Bytes`] cover what streams usually carry; write
/// your own for another format (`bytea` takes any).
///
/// A payload that [`decode`](Self::decode) refuses becomes a dead letter of the group that read it, with the error's text.
/// A handler that wants to see such payloads itself reads them with [`Lenient`].
pub trait Codec<T>: Send + Sync + 'static {
    /// The payload types that the codec can write and read.
    fn payload_types() -> &'static [PayloadType];

    /// The payload of a value.
    ///
    /// # Errors
    /// Whatever keeps the value from being written; the message is not sent.
    fn encode(value: &T) -> Result<Vec<u8>, Box<dyn StdError + Send + Sync>>;

    /// The value of a payload.
    ///
    /// # Errors
    /// Whatever keeps the payload from being read; the message becomes a dead letter.
    fn decode(payload: &[u8]) -> Result<T, Box<dyn StdError + Send + Sync>>;

    /// The value of a [tombstone](crate::Outgoing::tombstone), which has no payload. Of the codecs here [`Json`] reads it as JSON's
    /// `null`, so that a stream of `Option<T>` has `None`; [`Text`] and [`Bytes`] as nothing; [`Lenient`] as the codec in it.
    /// [`Message::tombstone`](crate::Message::tombstone) tells it from a payload that is the same.
    ///
    /// # Errors
    /// There is none; the message becomes a dead letter. This is the default.
    fn tombstone() -> Result<T, Box<dyn StdError + Send + Sync>> {
        Err("the codec reads no tombstones".into())
    }
}

/// JSON by serde, for streams of type `json` and `jsonb` (and `text` or `bytea`, if one must). The default codec.
#[derive(Debug, Clone, Copy)]
pub struct Json;

/// The most that is set aside for a payload before its length is known, in bytes.
const MOST_AHEAD: usize = 64 * 1024;

thread_local! {
    /// How long the payload was that this thread encoded last.
    static LATEST: Cell<usize> = const { Cell::new(128) };
}

impl<T: Serialize + DeserializeOwned> Codec<T> for Json {
    fn payload_types() -> &'static [PayloadType] {
        &[PayloadType::Json, PayloadType::Jsonb, PayloadType::Text, PayloadType::Bytea]
    }

    fn encode(value: &T) -> Result<Vec<u8>, Box<dyn StdError + Send + Sync>> {
        // As large as the one before, most likely: to grow means to copy.
        let mut payload = Vec::with_capacity(LATEST.get());
        serde_json::to_writer(&mut payload, value)?;
        LATEST.set(payload.len().min(MOST_AHEAD));
        Ok(payload)
    }

    fn decode(payload: &[u8]) -> Result<T, Box<dyn StdError + Send + Sync>> {
        Ok(serde_json::from_slice(payload)?)
    }

    fn tombstone() -> Result<T, Box<dyn StdError + Send + Sync>> {
        Self::decode(b"null")
    }
}

/// UTF-8 text, for any stream: what is sent to a `json` stream has to be JSON.
#[derive(Debug, Clone, Copy)]
pub struct Text;

impl Codec<String> for Text {
    fn payload_types() -> &'static [PayloadType] {
        &[PayloadType::Text, PayloadType::Json, PayloadType::Jsonb, PayloadType::Bytea]
    }

    fn encode(value: &String) -> Result<Vec<u8>, Box<dyn StdError + Send + Sync>> {
        Ok(value.clone().into_bytes())
    }

    fn decode(payload: &[u8]) -> Result<String, Box<dyn StdError + Send + Sync>> {
        Ok(String::from_utf8(payload.to_vec())?)
    }

    fn tombstone() -> Result<String, Box<dyn StdError + Send + Sync>> {
        Ok(String::new())
    }
}

/// Payloads as the bytes they are, for any stream: what is sent to a `json` stream has to be JSON, to a `text` stream UTF-8.
#[derive(Debug, Clone, Copy)]
pub struct Bytes;

impl Codec<Vec<u8>> for Bytes {
    fn payload_types() -> &'static [PayloadType] {
        &[PayloadType::Bytea, PayloadType::Text, PayloadType::Json, PayloadType::Jsonb]
    }

    fn encode(value: &Vec<u8>) -> Result<Vec<u8>, Box<dyn StdError + Send + Sync>> {
        Ok(value.clone())
    }

    fn decode(payload: &[u8]) -> Result<Vec<u8>, Box<dyn StdError + Send + Sync>> {
        Ok(payload.to_vec())
    }

    fn tombstone() -> Result<Vec<u8>, Box<dyn StdError + Send + Sync>> {
        Ok(Vec::new())
    }
}

/// What another codec can read, and the payloads that it cannot read as they are: the way out for a handler that knows what to
/// do with those, instead of finding them among the dead letters.
///
/// ```no_run
/// use sqlstreams::{Delivery, Json, Lenient, Outcome, Undecodable};
/// # #[derive(serde::Serialize, serde::Deserialize)] struct Order { id: u64 }
/// # async fn f(client: sqlstreams::Client) -> sqlstreams::Result<()> {
/// let orders = client
///     .stream::<Result<Order, Undecodable>>("orders")
///     .codec::<Lenient<Json>>()
///     .open()
///     .await?;
/// let handler = async |order: Delivery<Result<Order, Undecodable>>| match &order.payload {
///     Ok(order) => {
///         println!("order {}", order.id);
///         Outcome::Done
///     }
///     Err(raw) if raw.payload.starts_with(b"v1:") => {
///         println!("an order of old: {:?}", raw.payload);
///         Outcome::Done
///     }
///     Err(raw) => Outcome::Dead(raw.reason.clone()),
/// };
/// orders.group("receipts").consumer().run(handler).await?;
/// # Ok(()) }
/// ```
///
/// What is sent through it is written by the other codec, or is the undecodable payload as it was read.
pub struct Lenient<C>(PhantomData<fn() -> C>);

/// A payload that its codec could not read; see [`Lenient`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Undecodable {
    /// The bytes of the payload: of json, jsonb and text the UTF-8 text.
    pub payload: Vec<u8>,
    /// Why the codec refused it.
    pub reason: String,
}

impl fmt::Display for Undecodable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the payload cannot be decoded: {}", self.reason)
    }
}

impl StdError for Undecodable {}

impl<T, C: Codec<T>> Codec<Result<T, Undecodable>> for Lenient<C> {
    fn payload_types() -> &'static [PayloadType] {
        C::payload_types()
    }

    fn encode(value: &Result<T, Undecodable>) -> Result<Vec<u8>, Box<dyn StdError + Send + Sync>> {
        match value {
            Ok(value) => C::encode(value),
            Err(raw) => Ok(raw.payload.clone()),
        }
    }

    fn decode(payload: &[u8]) -> Result<Result<T, Undecodable>, Box<dyn StdError + Send + Sync>> {
        Ok(C::decode(payload)
            .map_err(|error| Undecodable { payload: payload.to_vec(), reason: error.to_string() }))
    }

    fn tombstone() -> Result<Result<T, Undecodable>, Box<dyn StdError + Send + Sync>> {
        Ok(C::tombstone()
            .map_err(|error| Undecodable { payload: Vec::new(), reason: error.to_string() }))
    }
}

/// A payload on its way to and from the server, without conversion: the binary form of json, text and bytea is the bytes
/// themselves, that of jsonb a version byte before them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Payload(pub(crate) Vec<u8>);

const JSONB_VERSION: u8 = 1;

impl ToSql for Payload {
    fn to_sql(
        &self,
        ty: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn StdError + Sync + Send>> {
        if *ty == Type::JSONB {
            out.extend_from_slice(&[JSONB_VERSION]);
        }
        out.extend_from_slice(&self.0);
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        [Type::JSON, Type::JSONB, Type::TEXT, Type::BYTEA].contains(ty)
    }

    to_sql_checked!();
}

/// A payload where it lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Raw<'a>(pub(crate) &'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn StdError + Sync + Send>> {
        match (ty, raw.split_first()) {
            (&Type::JSONB, Some((&JSONB_VERSION, rest))) => Ok(Self(rest)),
            (&Type::JSONB, _) => Err("unknown version of the binary form of jsonb".into()),
            _ => Ok(Self(raw)),
        }
    }

    fn accepts(ty: &Type) -> bool {
        <Payload as ToSql>::accepts(ty)
    }
}

impl<'a> FromSql<'a> for Payload {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn StdError + Sync + Send>> {
        Ok(Self(Raw::from_sql(ty, raw)?.0.to_vec()))
    }

    fn from_sql_null(_: &Type) -> Result<Self, Box<dyn StdError + Sync + Send>> {
        Ok(Self(Vec::new()))
    }

    fn accepts(ty: &Type) -> bool {
        <Self as ToSql>::accepts(ty)
    }
}
