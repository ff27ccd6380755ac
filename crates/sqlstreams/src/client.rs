//! The client: a pool of connections to one installation.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join3;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use crate::background::Background;
use crate::connect::{Connector, Dsn};
use crate::doctor::Doctor;
use crate::error::{Error, ErrorKind, Result};
use crate::maintain::Duty;
use crate::migrate::{self, MigrationReport};
use crate::payload::Json;
use crate::pool::{Pool, Pooled};
use crate::queries::{Queries, Query};
use crate::retention::Detaching;
use crate::schedule;
use crate::schema::Schema;
use crate::stream::{StreamBuilder, StreamInfo};
use crate::wake::{Bell, Watcher};

/// A connection to an installation of SQLStreams: a schema in a PostgreSQL database.
///
/// Cheap to clone; clones share one pool. Connections are opened when they are needed and reopened when they break.
///
/// ```no_run
/// # async fn f() -> sqlstreams::Result<()> {
/// let client = sqlstreams::Client::connect("postgres://app@localhost/shop").await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) pool: Pool,
    /// Where the connections go, without the password; for errors.
    pub(crate) target: String,
    pub(crate) schema: Schema,
    pub(crate) queries: Queries,
    pub(crate) connector: Connector,
    pub(crate) watcher: Watcher,
    pub(crate) bell: Bell,
    pub(crate) detaching: Detaching,
    pub(crate) duty: Duty,
    pub(crate) schedules: schedule::Bound,
    /// At most one message that may have killed its process runs in this one.
    pub(crate) suspects: Arc<Semaphore>,
    #[cfg(test)]
    pub(crate) faults: crate::supervision::Faults,
    /// Last: whatever else is dropped may still want to use it.
    pub(crate) background: Background,
}

/// Settings of a [`Client`], from [`Client::builder`].
#[derive(Debug, Clone)]
#[must_use]
pub struct ClientBuilder {
    url: String,
    schema: String,
    pool_size: usize,
    migrate: bool,
    listener: bool,
    maintenance: bool,
}

impl Client {
    /// Connects with the default settings and installs the schema if it is not there.
    ///
    /// `url` is a connection string as `psql` takes it, `postgres://…` or `host=… dbname=…`; what it leaves out comes from
    /// the `PG*` variables.
    ///
    /// # Errors
    /// The string makes no sense, the database cannot be reached, is read-only or too old, or lacks privileges.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::builder(url).connect().await
    }

    /// Starts from the default settings.
    pub fn builder(url: &str) -> ClientBuilder {
        ClientBuilder {
            url: url.to_owned(),
            schema: Schema::DEFAULT.to_owned(),
            pool_size: 8,
            migrate: true,
            listener: true,
            maintenance: true,
        }
    }

    /// A stream of JSON messages of type `T` by its name; see [`StreamBuilder`]. Nothing is sent yet.
    pub fn stream<T>(&self, name: impl Into<String>) -> StreamBuilder<T, Json> {
        StreamBuilder::new(self.clone(), name.into(), PhantomData)
    }

    /// All streams, by name.
    ///
    /// # Errors
    /// The database cannot be reached or the schema is not installed.
    pub async fn streams(&self) -> Result<Vec<StreamInfo>> {
        let rows = self
            .query(&self.inner.queries.list_streams, &[&None::<&str>], "list the streams")
            .await?;
        rows.iter().map(StreamInfo::from_row).collect()
    }

    /// Installs the schema, or brings it to this crate's version. Safe to call from any number of processes at once.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and [`SchemaMismatch`](ErrorKind::SchemaMismatch) when the schema is newer.
    pub async fn migrate(&self) -> Result<MigrationReport> {
        let mut connection = self.connection("install the schema").await?;
        migrate::migrate(&mut connection, &self.inner.schema).await
    }

    /// The schema's name, unquoted.
    pub fn schema(&self) -> &str {
        self.inner.schema.name()
    }

    /// A connection from the pool; `doing` is for the error.
    pub(crate) async fn connection(&self, doing: &str) -> Result<Pooled> {
        self.inner.pool.get(doing).await
    }

    /// Closes the idle connections: what broke one has probably broken the others.
    pub(crate) fn forget_idle_connections(&self) {
        self.inner.pool.close_idle();
    }

    /// Puts a connection back into the pool, unless the answer says that it is of no use any more. The idle ones may not be
    /// either: they lead to the same server, which has gone, or takes no writes, or hangs.
    pub(crate) fn keep<T>(&self, connection: Pooled, answer: Result<T>) -> Result<T> {
        if answer.as_ref().is_err_and(Error::is_of_connection) {
            connection.close();
            self.forget_idle_connections();
        }
        answer
    }

    /// One statement in a transaction of its own: READ COMMITTED whatever the default is. Takes as long as it takes.
    pub(crate) async fn query(
        &self,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Vec<Row>> {
        let connection = self.connection(doing).await?;
        let answer = transact(&connection, BEGIN, query, params).await;
        self.keep(connection, answer.map_err(|e| Error::from_driver(e, doing)))
    }

    /// One statement by itself, small enough to be answered soon: that is not waited for much longer.
    pub(crate) async fn ask(
        &self,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Vec<Row>> {
        let connection = self.connection(doing).await?;
        let answer = answered(SOON, run(&connection, query, params), doing).await;
        self.keep(connection, answer)
    }

    /// A statement that returns exactly one row.
    pub(crate) async fn query_one(
        &self,
        query: &Query,
        params: &[&(dyn ToSql + Sync)],
        doing: &str,
    ) -> Result<Row> {
        let mut rows = self.query(query, params, doing).await?;
        match (rows.pop(), rows.is_empty()) {
            (Some(row), true) => Ok(row),
            _ => Err(Error::new(
                ErrorKind::Database,
                format!("could not {doing}: not exactly one row came back"),
            )),
        }
    }
}

/// How long the server may take for an answer to something small.
pub(crate) const SOON: Duration = Duration::from_secs(5);
/// More than any server takes.
const MOST_CONNECTIONS: usize = 10_000;
pub(crate) const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";
/// For what a crash of the server may take back: it commits without waiting for the disk.
pub(crate) const BOOKKEEPING: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit = off";

/// Waits for an answer, but not for ever: a server may be frozen, or the network may swallow what is sent.
pub(crate) async fn within<T>(
    limit: Duration,
    answer: impl Future<Output = T>,
    doing: &str,
) -> Result<T> {
    timeout(limit, answer).await.map_err(|_| Error::no_answer(doing, limit))
}

/// The same for an answer of the driver's.
pub(crate) async fn answered<T>(
    limit: Duration,
    answer: impl Future<Output = Result<T, tokio_postgres::Error>>,
    doing: &str,
) -> Result<T> {
    within(limit, answer, doing).await?.map_err(|e| Error::from_driver(e, doing))
}

/// Begin, a statement and commit, in one write.
pub(crate) async fn transact(
    connection: &tokio_postgres::Client,
    begin: &str,
    query: &Query,
    params: &[&(dyn ToSql + Sync)],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    debug_assert_eq!(params.len(), query.types.len(), "{}", query.sql);
    let typed: Vec<_> = params.iter().copied().zip(query.types.iter().cloned()).collect();
    transact_typed(connection, begin, &query.sql, &typed).await
}

/// The same for a statement whose types depend on the stream's.
pub(crate) async fn transact_typed(
    connection: &tokio_postgres::Client,
    begin: &str,
    sql: &str,
    params: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    // Written in this order at the first poll; a statement that fails makes the commit a rollback.
    let (begun, rows, committed) = join3(
        connection.batch_execute(begin),
        connection.query_typed(sql, params),
        connection.batch_execute("COMMIT"),
    )
    .await;
    begun.and(rows).and_then(|rows| committed.map(|()| rows))
}

/// Sends a statement as one unnamed message, with the types it was written for.
pub(crate) async fn run(
    connection: &tokio_postgres::Client,
    query: &Query,
    params: &[&(dyn ToSql + Sync)],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    debug_assert_eq!(params.len(), query.types.len(), "{}", query.sql);
    let typed: Vec<_> = params.iter().copied().zip(query.types.iter().cloned()).collect();
    connection.query_typed(&query.sql, &typed).await
}

impl ClientBuilder {
    /// The schema that holds the installation. Default: `sqlstreams`.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// The most connections of the pool, 2 to 10,000. Default: 8. A client that consumes has one more, on which it listens. A
    /// transactional consumer takes one for each handler it may run at once, as long as one is left for everything else.
    pub fn pool_size(mut self, connections: usize) -> Self {
        self.pool_size = connections;
        self
    }

    /// Whether consumers listen for notifications, and are seen to be alive by others. Default: yes. Without, messages are
    /// found by polling alone, and what a consumer that died had in hand waits until its lease runs out. Behind a pooler in
    /// transaction mode, where a connection cannot listen, that is found out and done by itself.
    pub fn listener(mut self, listener: bool) -> Self {
        self.listener = listener;
        self
    }

    /// Whether consumers do the [maintenance](crate::Maintenance) of the installation beside their work, one of all processes at a time. Default: yes. If
    /// not, or where the client's role does not own the schema's tables, see to it that others do, or `sqlstreams maintain`: what is due stays undone meanwhile, but for partitions, which producers and consumers of this
    /// crate make themselves when they find too few.
    pub fn maintenance(mut self, maintenance: bool) -> Self {
        self.maintenance = maintenance;
        self
    }

    /// Whether [`connect`](Self::connect) installs or upgrades the schema. Default: yes. If not, it refuses a schema that is not of
    /// this version, or has not its functions.
    pub fn migrate(mut self, migrate: bool) -> Self {
        self.migrate = migrate;
        self
    }

    /// Connects.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub async fn connect(self) -> Result<Client> {
        let migrate = self.migrate;
        let client = self.open()?;
        if migrate {
            client.migrate().await?;
        } else {
            let connection = client.connection("look at the schema").await?;
            migrate::check(&connection, &client.inner.schema).await?;
        }
        Ok(client)
    }

    /// Connects for [`Doctor`](crate::Doctor), which also looks at a schema that is missing or of another version. Installs nothing.
    ///
    /// # Errors
    /// As [`Client::connect`], but for what the doctor finds.
    pub async fn doctor(self) -> Result<Doctor> {
        let client = self.open()?;
        // Whether there is a database at all.
        client.connection("look at the schema").await?;
        Ok(client.doctor())
    }

    /// Connects, installs or upgrades the schema whatever [`migrate`](Self::migrate) says, and tells what that changed.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub async fn connect_and_migrate(self) -> Result<(Client, MigrationReport)> {
        let client = self.open()?;
        let report = client.migrate().await?;
        Ok((client, report))
    }

    /// A client whose database was not spoken to yet.
    fn open(self) -> Result<Client> {
        let schema = Schema::new(&self.schema)?;
        if self.pool_size < 2 {
            return Err(Error::new(
                ErrorKind::InvalidConfig,
                format!("a pool of {} connections is too small", self.pool_size),
            )
            .with_hint("Give the client at least 2."));
        }
        if self.pool_size > MOST_CONNECTIONS {
            let text = format!("a pool of {} connections is too large", self.pool_size);
            return Err(Error::new(ErrorKind::InvalidConfig, text)
                .with_hint(format!("Give the client at most {MOST_CONNECTIONS}.")));
        }
        let dsn = Dsn::parse(&self.url)?;
        let background = Background::start()?;
        let connector = Connector::new(&dsn)?;
        let queries = Queries::new(&schema);
        let target = dsn.to_string();
        let pool = Pool::new(connector.clone(), &background, target.clone(), self.pool_size);
        Ok(Client {
            inner: Arc::new(Inner {
                pool,
                target,
                schema,
                queries,
                connector,
                watcher: Watcher::new(self.listener),
                bell: Bell::default(),
                detaching: Detaching::default(),
                duty: Duty::new(self.maintenance),
                schedules: schedule::Bound::default(),
                suspects: Arc::new(Semaphore::new(1)),
                #[cfg(test)]
                faults: crate::supervision::Faults::default(),
                background,
            }),
        })
    }
}
