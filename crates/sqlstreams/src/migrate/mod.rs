//! Installing and upgrading the schema.
//!
//! Tables change by numbered migrations, forward only; functions and views are made anew whenever the version or their text
//! changes. Any number of processes may do it at once. Installing is one transaction. An upgrade is several, since none may hold the
//! tables of many streams: each looks under an advisory lock at what is there, does what comes next and commits, so whoever migrates
//! after one that was interrupted goes on where it ended. No transaction waits longer than a moment for a lock that others would
//! then wait behind: it gives up, lets them pass, and tries again.

mod installed;
mod list;
#[cfg(test)]
mod released;
mod server;

use std::time::{Duration, Instant};

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client as PgClient, Transaction};

use self::installed::Installed;
use self::list::{FUNCTIONS, MIGRATIONS, Migration, checksum, functions_checksum, version};
use crate::error::{Error, Result};
use crate::schema::Schema;

/// How long, in milliseconds, to wait for what others have locked: everybody else waits behind.
const LOCKED_MS: u32 = 200;
/// For so long it is tried again.
const PATIENCE: Duration = Duration::from_secs(10);
/// For so long calls that were running may go on in functions that are replaced.
const CALLS: Duration = Duration::from_secs(5);
const DROP_REPLACED: &str = include_str!("../../sql/migrations/drop_replaced.sql");
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);

/// What [`Client::migrate`](crate::Client::migrate) did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MigrationReport {
    /// The schema's version before; `None` when it was not installed. Where an upgrade was interrupted, the version that it came from.
    pub from: Option<i32>,
    /// Its version now. It may be newer than this program, which can work with it then.
    pub to: i32,
    /// Whether anything was changed.
    pub changed: bool,
}

/// Brings the schema to the version of this crate. Cheap when it is there already: one query, no lock.
pub(crate) async fn migrate(client: &mut PgClient, schema: &Schema) -> Result<MigrationReport> {
    server::check(client).await?;
    let found = Installed::look(client, schema).await?;
    found.refuse_too_new(schema.quoted())?;
    if let Installed::Same | Installed::Newer(_) = found {
        let from = found.version();
        return Ok(MigrationReport { from, to: from.unwrap_or(0), changed: false });
    }
    let from = match found {
        Installed::Nothing => None,
        _ => installed::whole_version(client, schema).await?.or(found.version()),
    };
    let mut changed = false;
    let mut streams_of = None;
    let mut locked_since = None;
    loop {
        let taken = match step(client, schema, streams_of).await {
            Ok(Step::Nothing(to)) => return Ok(MigrationReport { from, to, changed }),
            Ok(Step::Finished) => {
                if from.is_some() {
                    drop_replaced(client, schema).await?;
                }
                return Ok(MigrationReport { from, to: version(), changed: true });
            }
            Ok(Step::Passed) => Ok(()),
            Ok(Step::Streams(version)) => {
                let migrated = migrate_streams(client, schema).await;
                streams_of = migrated.is_ok().then_some(version);
                migrated
            }
            Err(error) => Err(error),
        };
        match taken {
            Ok(()) => (changed, locked_since) = (true, None),
            Err(error) => wait_for_others(&mut locked_since, error).await?,
        }
    }
}

/// Waits a moment before what others have locked is tried for again; gives up in the end, and with any other error.
async fn wait_for_others(since: &mut Option<Instant>, error: Error) -> Result<()> {
    if error.sql_state() != Some(SqlState::LOCK_NOT_AVAILABLE.code()) {
        return Err(error);
    }
    if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
        return Err(error.with_hint("Try again when nobody has a transaction open that has read SQLStreams' views or tables: what changes waits for them."));
    }
    tokio::time::sleep(PAUSE).await;
    Ok(())
}

/// Refuses a schema that is not there or that this program cannot work with.
pub(crate) async fn check(client: &PgClient, schema: &Schema) -> Result<()> {
    Installed::look(client, schema).await?.require_usable(schema)
}

/// Whether the schema is of a later version than this crate's, so that migrating is of no use.
pub(crate) async fn is_newer(client: &PgClient, schema: &Schema) -> Result<bool> {
    let found = Installed::look(client, schema).await?;
    Ok(matches!(found, Installed::Newer(_) | Installed::TooNew(..)))
}

/// Makes the functions and views anew, of an installation of this version: somebody has dropped or changed some. `why` is noted in `audit`.
pub(crate) async fn remake_functions(
    client: &mut PgClient,
    schema: &Schema,
    why: &str,
) -> Result<()> {
    let mut locked_since = None;
    while let Err(error) = try_to_remake(client, schema, why).await {
        wait_for_others(&mut locked_since, error).await?;
    }
    Ok(())
}

async fn try_to_remake(client: &mut PgClient, schema: &Schema, why: &str) -> Result<()> {
    if is_well(client, schema).await? {
        return Ok(());
    }
    let tx = begin(client, schema).await?;
    let found = Installed::look(&tx, schema).await?;
    found.require_usable(schema)?;
    if found != Installed::Same {
        let text = format!("schema {} is of a later version than this program", schema.quoted());
        return Err(Error::new(crate::error::ErrorKind::SchemaMismatch, text)
            .with_hint("Have its functions made anew by a program of that version."));
    }
    enter(&tx, schema).await?;
    make_functions(&tx).await?;
    let note = "INSERT INTO audit (action, stream_name) VALUES ('doctor_' || $1, '')";
    tx.query_typed(note, &[(&why, Type::TEXT)]).await.map_err(failed)?;
    tx.commit().await.map_err(failed)
}

/// Whether all functions and views are there, as they were made: somebody else may have been faster. A look that fails says no.
async fn is_well(client: &mut PgClient, schema: &Schema) -> Result<bool> {
    let look = "SELECT f.missing IS NULL AND f.changed IS NULL AND NOT EXISTS (SELECT FROM shape_differences(NULL) WHERE part = 'view') FROM altered_functions() AS f";
    // A transaction of its own, after those that were faster; not a savepoint, below which functions would be another transaction's (installed.sql).
    let tx = begin(client, schema).await?;
    enter(&tx, schema).await?;
    let well = tx.query_typed_one(look, &[]).await.is_ok_and(|row| row.get(0));
    tx.rollback().await.map_err(failed)?;
    Ok(well)
}

/// What comes next, or what a transaction did.
enum Step {
    /// Somebody else was faster: the schema has this version.
    Nothing(i32),
    /// This version's tables are there, the streams have to follow.
    Streams(i32),
    /// A version's tables were made, or it was finished; more is to come.
    Passed,
    Finished,
}

/// The next transaction of an upgrade, or a whole installation. `streams_of`: the version to which the streams were brought already, all
/// but those that were created meanwhile.
async fn step(client: &mut PgClient, schema: &Schema, streams_of: Option<i32>) -> Result<Step> {
    let tx = begin(client, schema).await?;
    let found = Installed::look(&tx, schema).await?;
    found.refuse_too_new(schema.quoted())?;
    if let Installed::Same | Installed::Newer(_) = found {
        return Ok(Step::Nothing(found.version().unwrap_or(0)));
    }
    let Some(at) = found.version() else {
        create_schema(&tx, schema).await?;
        enter(&tx, schema).await?;
        tx.batch_execute(include_str!("../../sql/migrations/schema_migration.sql"))
            .await
            .map_err(failed)?;
        for migration in MIGRATIONS {
            make_catalog(&tx, migration).await?;
        }
        make_functions(&tx).await?;
        tx.commit().await.map_err(failed)?;
        return Ok(Step::Finished);
    };
    enter(&tx, schema).await?;
    let (known, next) = MIGRATIONS.split_at(MIGRATIONS.partition_point(|m| m.version <= at));
    if !is_finished(&tx, at).await? {
        if known.last().is_some_and(|m| m.stream.is_some()) {
            if streams_of != Some(at) {
                return Ok(Step::Streams(at));
            }
            // Those that were created since; none is before this transaction ends.
            tx.batch_execute(
                "SELECT migrate_stream(id) FROM stream; DROP FUNCTION migrate_stream(bigint); DROP FUNCTION IF EXISTS grant_like(text, text)",
            )
            .await
            .map_err(failed)?;
        }
        let finish =
            "UPDATE schema_migration SET finished_at = clock_timestamp() WHERE version = $1";
        tx.query_typed(finish, &[(&at, Type::INT4)]).await.map_err(failed)?;
    } else if let Some(next) = next.first() {
        // What is left of an upgrade before, if that was interrupted at its end.
        tx.batch_execute(DROP_REPLACED).await.map_err(failed)?;
        make_catalog(&tx, next).await?;
        if let Some(stream) = next.stream {
            tx.batch_execute(stream).await.map_err(failed)?;
        }
    }
    if at == version() {
        make_functions(&tx).await?;
    }
    tx.commit().await.map_err(failed)?;
    Ok(if at == version() { Step::Finished } else { Step::Passed })
}

async fn is_finished(tx: &Transaction<'_>, version: i32) -> Result<bool> {
    let sql = "SELECT finished_at IS NOT NULL FROM schema_migration WHERE version = $1";
    Ok(tx.query_typed_one(sql, &[(&version, Type::INT4)]).await.map_err(failed)?.get(0))
}

/// A transaction that no other migration runs beside, and no making and dropping of streams.
async fn begin<'a>(client: &'a mut PgClient, schema: &Schema) -> Result<Transaction<'a>> {
    // READ COMMITTED whatever the default is: what another process committed while we waited for the lock must be seen.
    let tx = client
        .build_transaction()
        .isolation_level(tokio_postgres::IsolationLevel::ReadCommitted)
        .start()
        .await
        .map_err(failed)?;
    tx.query_typed(
        "SELECT pg_advisory_xact_lock(hashtextextended('sqlstreams migrate ' || $1, 0))",
        &[(&schema.name(), Type::TEXT)],
    )
    .await
    .map_err(failed)?;
    Ok(tx)
}

async fn create_schema(tx: &Transaction<'_>, schema: &Schema) -> Result<()> {
    let exists = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)";
    let row = tx.query_typed_one(exists, &[(&schema.name(), Type::TEXT)]).await.map_err(failed)?;
    // Not IF NOT EXISTS: that wants the privilege to create schemas even where there is nothing to create.
    if !row.get::<_, bool>(0) {
        tx.batch_execute(&format!("CREATE SCHEMA {}", schema.quoted())).await.map_err(failed)?;
    }
    Ok(())
}

/// Names are those of the schema from here on.
async fn enter(tx: &Transaction<'_>, schema: &Schema) -> Result<()> {
    tx.batch_execute(&format!(
        "SET LOCAL search_path = {}, pg_temp; SET LOCAL client_min_messages = warning; SET LOCAL check_function_bodies = on; SET LOCAL lock_timeout = '{LOCKED_MS}ms'; SET LOCAL statement_timeout = 0",
        schema.quoted()
    ))
    .await
    .map_err(failed)
}

async fn make_catalog(tx: &Transaction<'_>, migration: &Migration) -> Result<()> {
    tx.batch_execute(migration.catalog).await.map_err(failed)?;
    tx.query_typed(
        "INSERT INTO schema_migration (version, oldest, name, checksum) VALUES ($1, $2, $3, $4)",
        &[
            (&migration.version, Type::INT4),
            (&migration.oldest, Type::INT4),
            (&migration.name, Type::TEXT),
            (&checksum(&[migration.catalog]), Type::TEXT),
        ],
    )
    .await
    .map_err(failed)?;
    Ok(())
}

/// Brings every stream there is to the version whose tables were made, each by itself.
async fn migrate_streams(client: &mut PgClient, schema: &Schema) -> Result<()> {
    let streams = format!("SELECT id FROM {}.stream ORDER BY id", schema.quoted());
    let rows = client.query_typed(&streams, &[]).await.map_err(failed)?;
    for row in rows {
        let id: i64 = row.get(0);
        let mut locked_since = None;
        while let Err(error) = migrate_stream(client, schema, id).await {
            wait_for_others(&mut locked_since, error).await?;
        }
    }
    Ok(())
}

async fn migrate_stream(client: &mut PgClient, schema: &Schema, id: i64) -> Result<()> {
    let tx = client.transaction().await.map_err(failed)?;
    enter(&tx, schema).await?;
    // Somebody else may have finished this version meanwhile.
    let exists = "SELECT FROM pg_proc WHERE proname = 'migrate_stream' AND pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())";
    if !tx.query_typed(exists, &[]).await.map_err(failed)?.is_empty() {
        tx.query_typed("SELECT migrate_stream($1)", &[(&id, Type::INT8)]).await.map_err(failed)?;
    }
    tx.commit().await.map_err(failed)
}

/// The functions and views of this version, in place of those that are there. Migrations without functions are those that came since.
async fn make_functions(tx: &Transaction<'_>) -> Result<()> {
    let rows = tx
        .query_typed("SELECT version FROM schema_migration WHERE functions IS NULL", &[])
        .await
        .map_err(failed)?;
    let since: Vec<i32> = rows.iter().map(|row| row.get(0)).collect();
    let known = "SELECT set_config('sqlstreams.known_functions', coalesce(array_agg(oid), '{}')::text, true)
                 FROM pg_proc WHERE pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())";
    tx.batch_execute(known).await.map_err(failed)?;
    let removed = MIGRATIONS.iter().filter(|m| since.contains(&m.version)).map(|m| m.functions);
    for sql in removed.chain(FUNCTIONS.iter().copied()) {
        tx.batch_execute(sql).await.map_err(failed)?;
    }
    tx.batch_execute(include_str!("../../sql/migrations/keep_grants.sql")).await.map_err(failed)?;
    let installed = "UPDATE schema_migration SET functions = $1, finished_at = clock_timestamp() WHERE functions IS NULL OR version = $2";
    let parameters: [(&(dyn ToSql + Sync), Type); 2] =
        [(&functions_checksum(), Type::TEXT), (&version(), Type::INT4)];
    tx.query_typed(installed, &parameters).await.map_err(failed)?;
    Ok(())
}

/// The last step: functions that were replaced are dropped when no call that began before can be running in them. If that does not come about,
/// they stay until the next upgrade, and harm nobody.
async fn drop_replaced(client: &mut PgClient, schema: &Schema) -> Result<()> {
    let since = Instant::now();
    let calls = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
                     AND backend_type = 'client backend' AND coalesce(state = 'active' AND query_start < clock_timestamp() - make_interval(secs => $1), true))";
    loop {
        tokio::time::sleep(PAUSE).await;
        let age = since.elapsed().as_secs_f64();
        let running = client.query_typed_one(calls, &[(&age, Type::FLOAT8)]).await;
        // Of other roles' sessions nothing is told: their calls get so long.
        if !running.map_err(failed)?.get::<_, bool>(0) || since.elapsed() > CALLS {
            break;
        }
    }
    let tx = begin(client, schema).await?;
    enter(&tx, schema).await?;
    tx.batch_execute(DROP_REPLACED).await.map_err(failed)?;
    tx.commit().await.map_err(failed)
}

fn failed(error: tokio_postgres::Error) -> Error {
    Error::from_driver(error, "install the schema")
}
