//! Installing and upgrading the schema.
//!
//! Tables change by numbered migrations, forward only; functions and views are made anew whenever the version or their
//! text changes. All of it happens in one transaction under an advisory lock, so that any number of processes may do it
//! at once and a failure leaves nothing half done.

use tokio_postgres::Client as PgClient;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use crate::error::{Error, ErrorKind, Result};
use crate::schema::Schema;

struct Migration {
    version: i32,
    name: &'static str,
    sql: &'static str,
}

const MIGRATIONS: &[Migration] = &[Migration {
    version: 1,
    name: "catalog",
    sql: include_str!("../sql/migrations/0001_catalog.sql"),
}];

/// In the order of their use: SQL-language functions and views are checked when they are made.
const FUNCTIONS: &[&str] = &[
    include_str!("../sql/functions/checks.sql"),
    include_str!("../sql/functions/ring.sql"),
    include_str!("../sql/functions/partition.sql"),
    include_str!("../sql/functions/stream.sql"),
    include_str!("../sql/functions/group.sql"),
    include_str!("../sql/functions/fence.sql"),
    include_str!("../sql/functions/cursor.sql"),
    include_str!("../sql/functions/retry.sql"),
    include_str!("../sql/functions/flow.sql"),
    include_str!("../sql/functions/owner.sql"),
    include_str!("../sql/functions/transaction.sql"),
    include_str!("../sql/functions/lease.sql"),
    include_str!("../sql/functions/lanes.sql"),
    include_str!("../sql/functions/fair.sql"),
    include_str!("../sql/functions/lanes_settle.sql"),
    include_str!("../sql/functions/lanes_mode.sql"),
    include_str!("../sql/functions/claim.sql"),
    include_str!("../sql/functions/binding.sql"),
    include_str!("../sql/functions/binding_set.sql"),
    include_str!("../sql/functions/lanes_claim.sql"),
    include_str!("../sql/functions/fetch.sql"),
    include_str!("../sql/functions/settle.sql"),
    include_str!("../sql/functions/exceptions.sql"),
    include_str!("../sql/functions/watch.sql"),
    include_str!("../sql/functions/dead.sql"),
    include_str!("../sql/functions/payload.sql"),
    include_str!("../sql/functions/commit.sql"),
    include_str!("../sql/functions/views.sql"),
    include_str!("../sql/functions/produce.sql"),
    include_str!("../sql/functions/delayed.sql"),
    include_str!("../sql/functions/schedule.sql"),
    include_str!("../sql/functions/current.sql"),
    include_str!("../sql/functions/compact.sql"),
    include_str!("../sql/functions/reclaim.sql"),
    include_str!("../sql/functions/group_expiry.sql"),
    include_str!("../sql/functions/maintain.sql"),
    include_str!("../sql/functions/generated.sql"),
];

/// How long, in seconds, to wait for what others have locked: everybody else waits behind.
const LOCKED_S: u32 = 5;
/// The oldest server this runs on, as in `server_version_num`.
const OLDEST_SERVER: i32 = 150_000;

/// What [`Client::migrate`](crate::Client::migrate) did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MigrationReport {
    /// The schema's version before; `None` when it was not installed.
    pub from: Option<i32>,
    /// Its version now.
    pub to: i32,
    /// Whether anything was changed.
    pub changed: bool,
}

/// The state of the schema as found in the database.
#[derive(Debug, PartialEq, Eq)]
enum Installed {
    Nothing,
    Version { version: i32, functions: String },
}

/// Brings the schema to the version of this crate. Cheap when it is there already: one query, no lock.
pub(crate) async fn migrate(client: &mut PgClient, schema: &Schema) -> Result<MigrationReport> {
    check_server(client).await?;
    let current = version();
    let functions = functions_checksum();
    if let Installed::Version { version, functions: installed } = installed(client, schema).await? {
        refuse_newer(version, schema)?;
        if version == current && installed == functions {
            return Ok(MigrationReport { from: Some(version), to: version, changed: false });
        }
    }

    let doing = "install the schema";
    let failed = |e: tokio_postgres::Error| {
        let is_locked = e.code() == Some(&SqlState::LOCK_NOT_AVAILABLE);
        let error = Error::from_driver(e, doing);
        match is_locked {
            true => error.with_hint("Try again when nobody has a transaction open that has read SQLStreams' views: a view that is new waits for them."),
            false => error,
        }
    };
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
    let from = match installed(&tx, schema).await? {
        Installed::Nothing => None,
        Installed::Version { version, functions: installed } => {
            refuse_newer(version, schema)?;
            if version == current && installed == functions {
                return Ok(MigrationReport { from: Some(version), to: version, changed: false });
            }
            Some(version)
        }
    };
    let exists = tx
        .query_typed_one(
            "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)",
            &[(&schema.name(), Type::TEXT)],
        )
        .await
        .map_err(failed)?
        .get::<_, bool>(0);
    // Not IF NOT EXISTS: that wants the privilege to create schemas even where there is nothing to create.
    if !exists {
        tx.batch_execute(&format!("CREATE SCHEMA {}", schema.quoted())).await.map_err(failed)?;
    }
    tx.batch_execute(&format!(
        "SET LOCAL search_path = {}, pg_temp; SET LOCAL client_min_messages = warning; SET LOCAL check_function_bodies = on; SET LOCAL lock_timeout = '{LOCKED_S}s';",
        schema.quoted()
    ))
    .await
    .map_err(failed)?;
    if from.is_none() {
        tx.batch_execute(
            "CREATE TABLE schema_migration (
                 version    int PRIMARY KEY,
                 name       text NOT NULL,
                 checksum   text NOT NULL,
                 functions  text NOT NULL,
                 applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
                 applied_by text NOT NULL DEFAULT session_user
             )",
        )
        .await
        .map_err(failed)?;
    }
    for migration in MIGRATIONS.iter().filter(|m| Some(m.version) > from) {
        tx.batch_execute(migration.sql).await.map_err(failed)?;
        tx.query_typed(
            "INSERT INTO schema_migration (version, name, checksum, functions) VALUES ($1, $2, $3, '')",
            &[(&migration.version, Type::INT4), (&migration.name, Type::TEXT), (&checksum(&[migration.sql]), Type::TEXT)],
        )
        .await
        .map_err(failed)?;
    }
    for sql in FUNCTIONS {
        tx.batch_execute(sql).await.map_err(failed)?;
    }
    tx.query_typed(
        "UPDATE schema_migration SET functions = $1 WHERE version = $2",
        &[(&functions, Type::TEXT), (&current, Type::INT4)],
    )
    .await
    .map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(MigrationReport { from, to: current, changed: true })
}

/// Refuses a schema that is not there or not of this version.
pub(crate) async fn check(client: &PgClient, schema: &Schema) -> Result<()> {
    match installed(client, schema).await? {
        Installed::Version { version, functions } if version == self::version() => {
            if functions == functions_checksum() {
                return Ok(());
            }
            let text = format!("schema {} has not the functions of this program", schema.quoted());
            Err(Error::new(ErrorKind::SchemaMismatch, text).with_hint(
                "Run `sqlstreams migrate` of the version that this program is built with.",
            ))
        }
        Installed::Version { version, .. } => {
            refuse_newer(version, schema)?;
            Err(Error::new(
                ErrorKind::SchemaMismatch,
                format!(
                    "schema {} has version {version}, this program needs {}",
                    schema.quoted(),
                    self::version()
                ),
            )
            .with_hint("Run `sqlstreams migrate`."))
        }
        Installed::Nothing => Err(Error::new(
            ErrorKind::SchemaMissing,
            format!("SQLStreams is not installed in schema {} of this database", schema.quoted()),
        )
        .with_hint("Run `sqlstreams migrate`, or check the database and the schema name.")),
    }
}

async fn check_server(client: &PgClient) -> Result<()> {
    let row = client
        .query_typed_one(
            "SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_setting('server_encoding'), pg_is_in_recovery(), current_setting('transaction_read_only')::bool",
            &[],
        )
        .await
        .map_err(|e| Error::from_driver(e, "look at the server"))?;
    let (number, version, encoding): (i32, String, String) = (row.get(0), row.get(1), row.get(2));
    let (standby, read_only): (bool, bool) = (row.get(3), row.get(4));
    if number < OLDEST_SERVER {
        return Err(Error::new(
            ErrorKind::UnsupportedServer,
            format!("this server is PostgreSQL {version}, SQLStreams needs 15 or newer"),
        )
        .with_hint("Upgrade the server, or connect to another one."));
    }
    if encoding != "UTF8" {
        return Err(Error::new(
            ErrorKind::UnsupportedServer,
            format!("this database stores text as {encoding}, SQLStreams needs UTF8"),
        )
        .with_hint("Create a database with ENCODING 'UTF8' TEMPLATE template0."));
    }
    if standby {
        return Err(Error::new(
            ErrorKind::ReadOnly,
            "this server is a standby, which takes no writes",
        )
        .with_hint("Connect to the primary."));
    }
    if read_only {
        return Err(Error::new(
            ErrorKind::ReadOnly,
            "this database takes no writes: default_transaction_read_only is on",
        )
        .with_hint("Turn it off for this role or database, or connect to another one."));
    }
    Ok(())
}

async fn installed(
    client: &impl tokio_postgres::GenericClient,
    schema: &Schema,
) -> Result<Installed> {
    let failed = |e| Error::from_driver(e, "look at the schema");
    let table = format!("{}.schema_migration", schema.quoted());
    // Not by to_regclass: a session that has once found nothing remembers that while it waits for the lock.
    let exists = client
        .query_typed(
            "SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'schema_migration' AND relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1))",
            &[(&schema.name(), Type::TEXT)],
        )
        .await
        .map_err(failed)?
        .first()
        .is_some_and(|row| row.get(0));
    if !exists {
        return Ok(Installed::Nothing);
    }
    let rows = client
        .query_typed(
            &format!("SELECT version, functions FROM {table} ORDER BY version DESC LIMIT 1"),
            &[],
        )
        .await
        .map_err(failed)?;
    Ok(match rows.first() {
        Some(row) => Installed::Version { version: row.get(0), functions: row.get(1) },
        None => Installed::Nothing,
    })
}

fn refuse_newer(version: i32, schema: &Schema) -> Result<()> {
    if version <= self::version() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::SchemaMismatch,
        format!(
            "schema {} has version {version}, newer than the {} this program knows",
            schema.quoted(),
            self::version()
        ),
    )
    .with_hint("Upgrade this program; nothing was changed."))
}

fn version() -> i32 {
    MIGRATIONS.iter().map(|m| m.version).max().unwrap_or(0)
}

fn functions_checksum() -> String {
    checksum(FUNCTIONS)
}

/// FNV-1a: tells texts apart, and is no secret.
fn checksum(texts: &[&str]) -> String {
    let hash =
        texts.iter().flat_map(|t| t.bytes()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_up_without_holes() {
        for (i, m) in MIGRATIONS.iter().enumerate() {
            assert_eq!(m.version, i as i32 + 1, "{}", m.name);
        }
    }
}
