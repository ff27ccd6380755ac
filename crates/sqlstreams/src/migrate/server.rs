//! Whether a server and a database will do.

use tokio_postgres::Client as PgClient;

use crate::error::{Error, ErrorKind, Result};

/// The oldest server this runs on, as in `server_version_num`.
const OLDEST_SERVER: i32 = 150_000;

pub(crate) async fn check(client: &PgClient) -> Result<()> {
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
