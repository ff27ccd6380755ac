//! The command line: options that all commands share, and the list of commands.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand};

use crate::commands;
use crate::demo::DemoArgs;

/// Queues and logs in one, as tables in the PostgreSQL you already run.
#[derive(Debug, Parser)]
#[command(name = "sqlstreams", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// The database: a URL or `host=… dbname=…`, as psql takes it
    #[arg(long, global = true, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    pub(crate) database_url: Option<String>,
    /// The schema that holds the streams
    #[arg(long, global = true, env = "SQLSTREAMS_SCHEMA", default_value = "sqlstreams")]
    pub(crate) schema: String,
    /// The folder with PostgreSQL's programs, for `up` and `demo`
    #[arg(long, global = true, env = "SQLSTREAMS_PG_BIN", value_name = "DIR")]
    pub(crate) pg_bin: Option<PathBuf>,
    /// The folder of the PostgreSQL that `up` runs
    #[arg(long, global = true, env = "SQLSTREAMS_UP_DIR", value_name = "DIR")]
    pub(crate) up_dir: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Say more on stderr; twice for debugging
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show all of it at work on a throw-away PostgreSQL
    Demo(DemoArgs),
    /// Start a private PostgreSQL for development and print its URL
    Up(commands::up::UpArgs),
}
