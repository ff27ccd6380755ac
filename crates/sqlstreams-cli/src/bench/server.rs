//! The server that something was measured on: without it the numbers say little.

use std::fmt;

use anyhow::Context as _;
use serde::Serialize;

use crate::context::Database;

/// What matters of it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Server {
    version: String,
    /// Whether it was started for this run.
    throw_away: bool,
    fsync: String,
    synchronous_commit: String,
}

impl Server {
    /// Asks over a connection to it.
    pub(crate) async fn look_at(
        database: &Database,
        db: &tokio_postgres::Client,
    ) -> anyhow::Result<Self> {
        let sql = "SELECT current_setting('server_version'), current_setting('fsync'),
                          current_setting('synchronous_commit')";
        let row = db.query_one(sql, &[]).await.context("could not look at the server")?;
        // What follows is the packager's: "15.18 (Debian 15.18-0+deb12u1)".
        let version: &str = row.get(0);
        Ok(Self {
            version: version.split(' ').next().unwrap_or_default().to_owned(),
            throw_away: matches!(database, Database::ThrowAway { .. }),
            fsync: row.get(1),
            synchronous_commit: row.get(2),
        })
    }
}

impl Server {
    /// Whether it was started for this run.
    pub(crate) fn is_throw_away(&self) -> bool {
        self.throw_away
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, fsync, synchronous_commit, .. } = self;
        let whose = match self.throw_away {
            true => format!("A PostgreSQL {version} of its own"),
            false => format!("The given PostgreSQL {version}"),
        };
        write!(f, "{whose}, fsync {fsync}, synchronous_commit {synchronous_commit}")
    }
}
