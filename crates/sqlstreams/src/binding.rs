//! Bindings: what of a stream is for a group.

use std::fmt;
use std::time::SystemTime;

use serde_json::{Map, Value};
use tokio_postgres::types::ToSql;

use crate::error::{Error, ErrorKind, Result};
use crate::group::Group;
use crate::message::{Headers, holds_nul};
use crate::stream::Stream;

/// One binding of a group: a pattern over routing keys, conditions on headers, or both.
///
/// A routing key is words with dots between them. In a pattern `*` stands for exactly one word and `#` for any number of them,
/// none included; everything else stands for itself. Of the headers, all that the binding names have to be there with the
/// same value; a value that is an object or an array has to contain what is named of it, as `@>` of PostgreSQL's jsonb
/// tells. A message without a routing key has no word: only `#` matches it.
///
/// ```
/// use sqlstreams::Binding;
///
/// let created = Binding::from("orders.*.created");
/// let european = Binding::from("orders.#").header("region", "eu");
/// let urgent = Binding::headers([("urgent", true)]);
/// ```
///
/// A pattern has at most 255 bytes and 32 words, none of them empty; header conditions at most 2,048 bytes of JSON; a group at
/// most 64 bindings. What is wrong with one is told where it is given to a group:
/// [`InvalidBinding`](ErrorKind::InvalidBinding).
#[derive(Debug, Clone, PartialEq)]
pub struct Binding {
    pattern: Option<String>,
    headers: Headers,
}

impl Binding {
    /// For messages with these headers, whatever their routing key is.
    pub fn headers<K: Into<String>, V: Into<Value>>(
        headers: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        let headers = headers.into_iter().map(|(name, value)| (name.into(), value.into()));
        Self { pattern: None, headers: headers.collect() }
    }

    /// Of these messages, only those with this header.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// The pattern, if there is one: in its normal form, where it comes from a group.
    pub fn pattern(&self) -> Option<&str> {
        self.pattern.as_deref()
    }

    /// The conditions on headers.
    pub fn header_conditions(&self) -> &Headers {
        &self.headers
    }

    /// As the protocol has it.
    fn to_json(&self) -> Value {
        let mut object = Map::new();
        if let Some(pattern) = &self.pattern {
            object.insert("pattern".to_owned(), pattern.as_str().into());
        }
        if !self.headers.is_empty() {
            object.insert("headers".to_owned(), self.headers.clone().into());
        }
        object.into()
    }

    fn from_json(value: &Value) -> Self {
        let object = |name: &str| value.get(name).and_then(Value::as_object).cloned();
        Self {
            pattern: value.get("pattern").and_then(Value::as_str).map(str::to_owned),
            headers: object("headers").unwrap_or_default(),
        }
    }
}

impl<P: Into<String>> From<P> for Binding {
    /// For messages whose routing key matches this pattern.
    fn from(pattern: P) -> Self {
        Self { pattern: Some(pattern.into()), headers: Headers::new() }
    }
}

impl fmt::Display for Binding {
    /// The pattern, or JSON where there are conditions on headers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.pattern, self.headers.is_empty()) {
            (Some(pattern), true) => f.write_str(pattern),
            _ => write!(f, "{}", self.to_json()),
        }
    }
}

/// The bindings of a group from a change to the next one.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct BindingSet {
    /// Counted from 1.
    pub version: i32,
    /// They hold for ids above this one, up to that of the next version.
    pub after_id: i64,
    /// The bindings; none: every message is for the group.
    pub bindings: Vec<Binding>,
    /// When they were set.
    pub changed_at: SystemTime,
    /// By which role.
    pub changed_by: String,
}

/// A group that a message would reach; from [`Stream::test_bindings`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Reached {
    /// The group's name.
    pub group: String,
    /// The binding by which it does; `None`: the group has none and receives everything.
    pub binding: Option<Binding>,
}

/// Bindings as they are sent. What is refused here is what PostgreSQL could not even read.
pub(crate) fn to_json(bindings: &[Binding]) -> Result<String> {
    let json = Value::from_iter(bindings.iter().map(Binding::to_json));
    match holds_nul(&json) {
        true => Err(Error::new(ErrorKind::InvalidBinding, "a binding holds the character U+0000")
            .with_hint("No routing key or header holds it either.")),
        false => Ok(json.to_string()),
    }
}

pub(crate) fn from_json(json: &str) -> Result<Vec<Binding>> {
    let read: Vec<Value> = serde_json::from_str(json).map_err(|e| {
        Error::new(ErrorKind::Database, "the group's bindings cannot be read").with_source(e)
    })?;
    Ok(read.iter().map(Binding::from_json).collect())
}

impl<T, C> Group<T, C> {
    /// The bindings that hold for what is handed out from now on. None: every message is for the group.
    ///
    /// # Errors
    /// [`UnknownGroup`](ErrorKind::UnknownGroup), or the database's.
    pub async fn bindings(&self) -> Result<Vec<Binding>> {
        let stream = &self.stream.inner;
        let query = &stream.client.inner.queries.current_bindings;
        let row =
            stream.client.query_one(query, &[&stream.id, &self.id], "read the bindings").await?;
        from_json(row.get(0))
    }

    /// Replaces the bindings; with none, the group receives everything. Returns whether that changed anything.
    ///
    /// The change is forward only and atomic: it holds for messages that no consumer has claimed yet, above the group's
    /// [`claimed`](crate::GroupStatus::claimed) at this moment, also when they were produced before. What was claimed is
    /// judged as before, by whomever it is handled in the end. Exceptions and dead letters stay.
    ///
    /// ```no_run
    /// # async fn f(group: sqlstreams::Group<u64>) -> sqlstreams::Result<()> {
    /// use sqlstreams::Binding;
    ///
    /// group.set_bindings(["orders.*.created".into(), Binding::headers([("urgent", true)])]).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`InvalidBinding`](ErrorKind::InvalidBinding): nothing is changed then. [`UnknownGroup`](ErrorKind::UnknownGroup), or
    /// the database's.
    pub async fn set_bindings(&self, bindings: impl IntoIterator<Item = Binding>) -> Result<bool> {
        let bindings: Vec<Binding> = bindings.into_iter().collect();
        let query = &self.stream.inner.client.inner.queries.set_bindings;
        self.change(query, &bindings).await
    }

    /// Adds a binding; says whether it is new. For a group without bindings, which receives everything, it is the only one
    /// then. Otherwise as [`set_bindings`](Self::set_bindings).
    ///
    /// # Errors
    /// As [`set_bindings`](Self::set_bindings).
    pub async fn bind(&self, binding: impl Into<Binding>) -> Result<bool> {
        let query = &self.stream.inner.client.inner.queries.bind;
        self.change(query, &[binding.into()]).await
    }

    /// Takes a binding away; says whether there was one. Otherwise as [`set_bindings`](Self::set_bindings).
    ///
    /// # Errors
    /// As [`set_bindings`](Self::set_bindings). The last binding is refused, too: without any, the group would receive
    /// everything. If that is meant, set none.
    pub async fn unbind(&self, binding: impl Into<Binding>) -> Result<bool> {
        let query = &self.stream.inner.client.inner.queries.unbind;
        self.change(query, &[binding.into()]).await
    }

    /// The last hundred changes of the bindings, oldest first.
    ///
    /// # Errors
    /// The database's.
    pub async fn binding_history(&self) -> Result<Vec<BindingSet>> {
        let client = &self.stream.inner.client;
        let query = &client.inner.queries.list_binding_sets;
        let (stream, group) = (Some(self.stream.name()), Some(self.name()));
        let rows = client.query(query, &[&stream, &group], "read the bindings").await?;
        rows.iter()
            .map(|row| {
                Ok(BindingSet {
                    version: row.get(0),
                    after_id: row.get(1),
                    bindings: from_json(row.get(2))?,
                    changed_at: row.get(3),
                    changed_by: row.get(4),
                })
            })
            .collect()
    }

    async fn change(&self, query: &crate::queries::Query, bindings: &[Binding]) -> Result<bool> {
        let stream = &self.stream.inner;
        let json = to_json(bindings)?;
        let doing = "change the bindings of the group";
        let row = stream.client.query_one(query, &[&stream.id, &self.id, &json], doing).await?;
        Ok(row.get(0))
    }
}

impl<T, C> Stream<T, C> {
    /// Which groups a message with this routing key and these headers would reach if it were sent now, and by which of their
    /// bindings: one for each that matches.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a routing key that no message can have, or the database's.
    pub async fn test_bindings(
        &self,
        routing_key: Option<&str>,
        headers: &Headers,
    ) -> Result<Vec<Reached>> {
        let headers = Value::from(headers.clone());
        if holds_nul(&headers) || routing_key.is_some_and(|key| key.contains('\0')) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "no routing key and no header holds the character U+0000",
            ));
        }
        let (client, headers) = (&self.inner.client, headers.to_string());
        let query = &client.inner.queries.test_bindings;
        let params: [&(dyn ToSql + Sync); 3] = [&self.inner.id, &routing_key, &headers];
        let rows = client.query(query, &params, "test the bindings").await?;
        rows.iter()
            .map(|row| {
                let binding = row.get::<_, Option<&str>>(1).map(from_json).transpose()?;
                let binding = binding.and_then(|one| one.into_iter().next());
                Ok(Reached { group: row.get(0), binding })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bindings_are_read_as_they_are_written() {
        let bindings = vec![
            Binding::from("a.*.#"),
            Binding::headers([("n", 1)]).header("o", serde_json::json!({"p": [true]})),
            Binding::from(r#"it's "a\b" é"#).header("x", Value::Null),
        ];
        assert_eq!(from_json(&to_json(&bindings).unwrap()).unwrap(), bindings);
        assert_eq!(bindings[0].to_string(), "a.*.#");
        assert_eq!(
            bindings[2].to_string(),
            r#"{"headers":{"x":null},"pattern":"it's \"a\\b\" é"}"#
        );
    }

    #[test]
    fn nul_is_refused_wherever_it_stands() {
        for binding in
            [Binding::from("a\0"), Binding::headers([("a", "\0")]), Binding::headers([("\0", 1)])]
        {
            assert_eq!(to_json(&[binding]).unwrap_err().kind(), ErrorKind::InvalidBinding);
        }
    }
}
