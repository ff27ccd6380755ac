//! What is installed in a database, and whether this program can work with it.

use tokio_postgres::types::Type;

use super::list::{functions_checksum, version};
use crate::error::{Error, ErrorKind, Result};
use crate::schema::Schema;

/// The state of the schema as found in the database.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Installed {
    Nothing,
    /// Older than this program, or on its way here.
    Older(i32),
    /// Of this version, with its functions.
    Same,
    /// Of this version, with the functions of another build of it, or none yet.
    OtherFunctions,
    /// Newer, and made for programs like this one as well.
    Newer(i32),
    /// Newer than this program can work with; programs of the second version can.
    TooNew(i32, i32),
}

impl Installed {
    pub(crate) async fn look(
        client: &impl tokio_postgres::GenericClient,
        schema: &Schema,
    ) -> Result<Self> {
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
                &format!(
                    "SELECT version, oldest, functions FROM {table} ORDER BY version DESC LIMIT 1"
                ),
                &[],
            )
            .await
            .map_err(failed)?;
        let Some(row) = rows.first() else { return Ok(Self::Nothing) };
        let (found, oldest, functions): (i32, i32, Option<&str>) =
            (row.get(0), row.get(1), row.get(2));
        Ok(match found {
            _ if found < version() => Self::Older(found),
            _ if found > version() && oldest > version() => Self::TooNew(found, oldest),
            _ if found > version() => Self::Newer(found),
            _ if functions == Some(&*functions_checksum()) => Self::Same,
            _ => Self::OtherFunctions,
        })
    }

    /// The version that is there, be it in part; `None` when nothing is.
    pub(crate) fn version(&self) -> Option<i32> {
        match *self {
            Self::Nothing => None,
            Self::Older(found) | Self::Newer(found) | Self::TooNew(found, _) => Some(found),
            Self::Same | Self::OtherFunctions => Some(version()),
        }
    }

    /// Refuses a schema that this program cannot work with as it is.
    pub(crate) fn require_usable(&self, schema: &Schema) -> Result<()> {
        let (schema, ours) = (schema.quoted(), version());
        let (text, hint) = match *self {
            Self::Same | Self::Newer(_) => return Ok(()),
            Self::TooNew(..) => return self.refuse_too_new(schema),
            Self::Nothing => {
                let text =
                    format!("SQLStreams is not installed in schema {schema} of this database");
                let hint = "Run `sqlstreams migrate`, or check the database and the schema name.";
                return Err(Error::new(ErrorKind::SchemaMissing, text).with_hint(hint));
            }
            Self::Older(found) => (
                format!("schema {schema} has version {found}, this program needs {ours}"),
                "Run `sqlstreams migrate`: programs of the older version can go on beside it.",
            ),
            Self::OtherFunctions => (
                format!("schema {schema} has not the functions of this program"),
                "Run `sqlstreams migrate` of the version that this program is built with.",
            ),
        };
        Err(Error::new(ErrorKind::SchemaMismatch, text).with_hint(hint))
    }

    /// Refuses only what is too new to be touched.
    pub(crate) fn refuse_too_new(&self, schema: &str) -> Result<()> {
        let Self::TooNew(found, oldest) = *self else { return Ok(()) };
        let text = format!(
            "schema {schema} has version {found}, for programs that know {oldest} or more, and this one knows {}",
            version()
        );
        Err(Error::new(ErrorKind::SchemaMismatch, text)
            .with_hint("Upgrade this program; nothing was changed."))
    }
}

/// The last version that is there as a whole, with its functions; others are of an upgrade that is under way, or was interrupted.
pub(crate) async fn whole_version(
    client: &impl tokio_postgres::GenericClient,
    schema: &Schema,
) -> Result<Option<i32>> {
    let whole = format!(
        "SELECT max(version) FROM {}.schema_migration WHERE functions IS NOT NULL",
        schema.quoted()
    );
    let rows = client.query_typed(&whole, &[]).await;
    let rows = rows.map_err(|e| Error::from_driver(e, "look at the schema"))?;
    Ok(rows.first().and_then(|row| row.get(0)))
}
