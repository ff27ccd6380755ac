//! What commands share: options, the database, and how to speak to the person at the terminal.

use std::path::Path;

use anyhow::Context as _;
use sqlstreams::{Client, ErrorKind};
use sqlstreams_dev::{Cluster, Persistent, Programs};
use tokio::task::spawn_blocking;

use crate::cli::Global;
use crate::failure::Failure;
use crate::terminal::{self, DIM};

/// What a command is given beside its own options.
pub(crate) struct Context {
    global: Global,
}

/// A database to work on. A throw-away one lives as long as this value.
pub(crate) enum Database {
    /// Named by `--database-url` or `DATABASE_URL`.
    Given { url: String },
    /// A private server of this process; dropping it stops the server and deletes the data.
    ThrowAway { cluster: Box<Cluster> },
}

impl Database {
    /// What [`Client::connect`] takes. Holds a password: not for printing.
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Given { url } => url.clone(),
            Self::ThrowAway { cluster } => cluster.url("postgres"),
        }
    }

    /// Stops a throw-away server. Dropping the value does the same but blocks a thread of the runtime for it.
    pub(crate) async fn close(self) {
        // What remains is left to the cluster's own watchdog.
        let _ = spawn_blocking(move || drop(self)).await;
    }
}

impl Context {
    pub(crate) fn new(global: Global) -> Self {
        Self { global }
    }

    /// Whether results are to be JSON.
    pub(crate) fn json(&self) -> bool {
        self.global.json
    }

    /// How often `-v` was given.
    pub(crate) fn verbosity(&self) -> u8 {
        self.global.verbose
    }

    /// The schema that holds the streams.
    pub(crate) fn schema(&self) -> &str {
        self.global.schema.as_deref().unwrap_or("sqlstreams")
    }

    /// Whether to draw progress bars, on stderr: nobody wants them in a log, or beside JSON.
    pub(crate) fn shows_progress(&self) -> bool {
        terminal::stderr_is_live() && !self.json()
    }

    /// Says what is happening, in one dim line on stderr; not beside JSON, whose readers want nothing else there.
    pub(crate) fn say(&self, line: &str) {
        if !self.json() {
            Self::say_line(line);
        }
    }

    /// The same, for where no context reaches.
    pub(crate) fn say_line(line: &str) {
        anstream::eprintln!("{DIM}{line}{DIM:#}");
    }

    /// The database that was asked for, if one was.
    pub(crate) fn given_database_url(&self) -> Option<&str> {
        self.global.database_url.as_deref().filter(|url| !url.trim().is_empty())
    }

    /// PostgreSQL's programs, if `--pg-bin` says where; `None` means look for them.
    pub(crate) fn programs(&self) -> anyhow::Result<Option<Programs>> {
        let folder = self.global.pg_bin.as_deref().filter(|folder| !folder.as_os_str().is_empty());
        Ok(folder.map(Programs::in_folder).transpose()?)
    }

    /// The given database, or else a private server that goes when the value goes, Ctrl-C and `kill -9` included.
    pub(crate) async fn given_or_throw_away(&self) -> anyhow::Result<Database> {
        if let Some(url) = self.given_database_url() {
            return Ok(Database::Given { url: url.to_owned() });
        }
        let programs = self.programs()?;
        let cluster = spawn_blocking(move || {
            let mut builder = Cluster::builder().progress(&Self::say_line);
            if let Some(programs) = programs {
                builder = builder.programs(programs);
            }
            builder.start()
        })
        .await
        .context("the task that starts PostgreSQL ended early")??;
        Ok(Database::ThrowAway { cluster: Box::new(cluster) })
    }

    fn up_dir(&self) -> Option<&Path> {
        self.global.up_dir.as_deref().filter(|folder| !folder.as_os_str().is_empty())
    }

    /// The kept server of `sqlstreams up`, running or not.
    pub(crate) fn kept(&self) -> anyhow::Result<Persistent<'static>> {
        let mut kept = Persistent::new(self.up_dir())?;
        if let Some(programs) = self.programs()? {
            kept = kept.programs(programs);
        }
        Ok(kept)
    }

    /// The given database, or that of a running `sqlstreams up`.
    pub(crate) async fn database_url(&self) -> anyhow::Result<String> {
        if let Some(url) = self.given_database_url() {
            return Ok(url.to_owned());
        }
        // Where its folder cannot be looked at, nobody has run `up` here.
        let running = Persistent::new(self.up_dir()).and_then(|kept| kept.status()).ok().flatten();
        match running {
            Some(info) => {
                self.say(&format!(
                    "using the PostgreSQL of `sqlstreams up` (127.0.0.1:{})",
                    info.port
                ));
                Ok(info.url)
            }
            None => Err(Failure::usage("no_database", "no database given")
                .hint("set DATABASE_URL or --database-url, or run `sqlstreams up`")
                .into()),
        }
    }

    /// A client of that database that may write: the schema is installed or brought up to date first.
    pub(crate) async fn writer(&self) -> anyhow::Result<Client> {
        let url = self.database_url().await?;
        Ok(Client::builder(&url).schema(self.schema()).connect().await?)
    }

    /// A client of that database that may write: an older schema is brought up to date first, and a schema that is not there is refused. For commands
    /// that work with what exists: where its name was mistyped, they would find an empty installation of their own making.
    pub(crate) async fn updated(&self) -> anyhow::Result<Client> {
        let url = self.database_url().await?;
        let builder = || Client::builder(&url).schema(self.schema());
        match builder().migrate(false).connect().await {
            Ok(client) => {
                client.migrate().await?;
                Ok(client)
            }
            Err(error) if error.kind() == ErrorKind::SchemaMismatch => {
                Ok(builder().connect().await?)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The same for commands that make what they are told to: where there is nothing, the schema is installed if `install`.
    pub(crate) async fn updated_or(&self, install: bool) -> anyhow::Result<Client> {
        if install { self.writer().await } else { self.updated().await }
    }

    /// A client of that database for looking: installs nothing, and is content with a standby.
    pub(crate) async fn reader(&self) -> anyhow::Result<Client> {
        let url = self.database_url().await?;
        Ok(Client::builder(&url).schema(self.schema()).migrate(false).connect().await?)
    }
}
