//! Where a benchmark runs: a database, a stream of its own, and names for tables of its own.

use std::time::Duration;

use anyhow::Context as _;
use sqlstreams::{Client, Codec, Dsn, ErrorKind, Json, Stream, StreamBuilder};

use super::server::Server;
use crate::context::{Context, Database};
use crate::own_stream;
use crate::signals::Signals;

/// How long a statement that is under way is waited for at the end.
const UNDER_WAY: Duration = Duration::from_secs(5);

/// What a benchmark is given.
pub(crate) struct Place<T> {
    /// The stream, new and empty.
    pub(crate) stream: Stream<T>,
    /// Its own tables, new to it as well.
    pub(crate) tables: Tables,
    /// A plain connection.
    pub(crate) db: tokio_postgres::Client,
    /// The database. Holds a password: not for printing.
    pub(crate) url: String,
    pub(crate) server: Server,
    pub(crate) client: Client,
    /// The names of the other streams that it asked for.
    others: Vec<String>,
}

impl<T: Send + Sync + 'static> Place<T>
where
    Json: Codec<T>,
{
    /// Another stream, new and empty, which goes with the first.
    pub(crate) async fn another_stream(
        &mut self,
        suffix: &str,
        with: impl FnOnce(StreamBuilder<T>) -> StreamBuilder<T>,
    ) -> sqlstreams::Result<Stream<T>> {
        let name = format!("{}_{suffix}", self.stream.name());
        // Before it is there: whatever happens, it is looked for.
        self.others.push(name.clone());
        with(self.client.stream(name)).create().await
    }
}

/// Names of tables that go with a stream.
///
/// They are in the schema of the streams: whoever may create a stream there may create tables.
#[derive(Debug, Clone)]
pub(crate) struct Tables {
    schema: String,
    stream: String,
}

impl Tables {
    pub(crate) fn of(schema: &str, stream: &str) -> Self {
        Self { schema: schema.to_owned(), stream: stream.to_owned() }
    }

    /// The full name of one, for SQL.
    pub(crate) fn name(&self, table: &str) -> String {
        Self::in_schema(&self.schema, &format!("{}_{table}", self.stream))
    }

    /// The full name of any table, for SQL.
    pub(crate) fn in_schema(schema: &str, table: &str) -> String {
        let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
        format!("{}.{}", quoted(schema), quoted(table))
    }
}

/// Runs a benchmark on the given database or on a private server, in a stream named `prefix` and some digits; nothing when
/// interrupted. Afterwards the stream is gone, and so are these `tables`.
pub(crate) async fn on_own_stream<T, R>(
    context: &Context,
    signals: &Signals,
    prefix: &str,
    tables: &[&str],
    work: impl AsyncFnOnce(&mut Place<T>) -> anyhow::Result<R>,
) -> anyhow::Result<Option<R>>
where
    T: Send + Sync + 'static,
    Json: Codec<T>,
{
    let start = signals.stop.run_until_cancelled(context.given_or_throw_away());
    let Some(database) = start.await else { return Ok(None) };
    let database = database?;
    let done = on(&database, context, signals, prefix, tables, false, work).await;
    // The server goes before anybody hears that it is gone.
    database.close().await;
    done
}

/// The same on a server that is there. `stays`: others will run on it, so that everything is cleaned up even if it goes some time.
pub(crate) async fn on<T, R>(
    database: &Database,
    context: &Context,
    signals: &Signals,
    prefix: &str,
    tables: &[&str],
    stays: bool,
    work: impl AsyncFnOnce(&mut Place<T>) -> anyhow::Result<R>,
) -> anyhow::Result<Option<R>>
where
    T: Send + Sync + 'static,
    Json: Codec<T>,
{
    let url = database.url();
    let connect = async {
        let client = Client::builder(&url).schema(context.schema()).connect().await?;
        let db = Dsn::parse(&url)?.connect().await?;
        let server = Server::look_at(database, &db).await?;
        anyhow::Ok((client, db, server))
    };
    let Some(connected) = signals.stop.run_until_cancelled(connect).await else { return Ok(None) };
    let (client, db, server) = connected?;
    // From here to the guarded part nothing waits for signals, so that a stream which was made is dropped.
    let stream = own_stream::create::<T>(&client, prefix).await?;
    let names = Tables::of(context.schema(), stream.name());
    let mut place = Place { stream, tables: names, db, url, server, client, others: Vec::new() };
    let done = signals.stop.run_until_cancelled(work(&mut place)).await;
    if done.is_none() {
        context.say("Interrupted, cleaning up");
    }
    // A server that goes takes everything along.
    let dropped = match database {
        Database::ThrowAway { .. } if !stays || done.is_none() => Ok(()),
        _ => clean_up(place, tables).await,
    };
    let done = done.transpose()?;
    dropped?;
    Ok(done)
}

async fn clean_up<T>(place: Place<T>, tables: &[&str]) -> anyhow::Result<()>
where
    T: Send + Sync + 'static,
    Json: Codec<T>,
{
    // A benchmark that was cut short may have left a statement under way on its own connection: what that makes is there once it is
    // answered, unless it takes too long, or the connection is in a transaction, which goes with it.
    let _ = tokio::time::timeout(UNDER_WAY, place.db.simple_query("")).await;
    let db = Dsn::parse(&place.url)?.connect().await?;
    for table in tables {
        let sql = format!("DROP TABLE IF EXISTS {}", place.tables.name(table));
        db.batch_execute(&sql)
            .await
            .with_context(|| format!("could not drop the table {table}"))?;
    }
    for name in place.others {
        match place.client.stream::<T>(name).open().await {
            Ok(stream) => own_stream::drop(stream).await?,
            Err(error) if error.kind() == ErrorKind::UnknownStream => {}
            Err(error) => return Err(error.into()),
        }
    }
    own_stream::drop(place.stream).await?;
    Ok(())
}
