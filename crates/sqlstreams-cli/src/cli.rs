//! The command line: options that all commands share, and the list of commands.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand};

use crate::bench::BenchCommand;
use crate::commands::{consume, dead, delayed, down, group, message, migrate, produce, stream, up};
use crate::demo::DemoArgs;

const AFTER_HELP: &str = "\
First steps:
  sqlstreams demo                                    see all of it at work
  sqlstreams up                                      start a private PostgreSQL and keep it running
  sqlstreams stream create orders
  echo '{\"id\": 42}' | sqlstreams produce orders
  sqlstreams consume orders --group receipts         print what comes, Ctrl-C to stop

The database is the one of --database-url or DATABASE_URL, or else that of `sqlstreams up`.
With --json a command prints one JSON document on stdout (lists are arrays; `consume` prints one
object per line), and an error as {\"error\": {\"code\", \"message\", \"hint\"}} on stderr.

Exit codes:
  0    done
  1    failed
  2    the command line or the configuration makes no sense
  3    a stream, group or dead letter that was named does not exist
  4    the database cannot be reached or used: read-only, too old, no privilege, schema missing
  130  cut short by Ctrl-C (143: by SIGTERM)";

/// Queues and logs in one, as tables in the PostgreSQL you already run.
#[derive(Debug, Parser)]
#[command(name = "sqlstreams", version, propagate_version = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// The database: a URL or `host=… dbname=…`, as psql takes it. A password is better kept in
    /// DATABASE_URL, PGPASSWORD or ~/.pgpass: others can see command lines
    #[arg(long, global = true, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    pub(crate) database_url: Option<String>,
    /// The schema that holds the streams
    #[arg(
        long,
        global = true,
        env = "SQLSTREAMS_SCHEMA",
        value_name = "NAME",
        default_value = "sqlstreams"
    )]
    pub(crate) schema: String,
    /// The folder with PostgreSQL's programs, for `up`, `demo` and `bench`
    #[arg(long, global = true, env = "SQLSTREAMS_PG_BIN", value_name = "DIR")]
    pub(crate) pg_bin: Option<PathBuf>,
    /// The folder where `up` keeps its PostgreSQL
    #[arg(long, global = true, env = "SQLSTREAMS_UP_DIR", value_name = "DIR")]
    pub(crate) up_dir: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Say more on stderr; -vv for debugging
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show all of it at work, on a throw-away PostgreSQL
    Demo(DemoArgs),
    /// Start a private PostgreSQL for development and print its URL
    Up(up::UpArgs),
    /// Stop the PostgreSQL that `up` started; its data stays
    Down(down::DownArgs),
    /// Install the schema, or bring it up to date
    Migrate(migrate::MigrateArgs),
    /// Create, list, show, alter and drop streams
    #[command(subcommand)]
    Stream(stream::StreamCommand),
    /// Send lines of a file or of stdin as messages
    Produce(produce::ProduceArgs),
    /// Print the messages of a stream, or hand each to a command
    Consume(consume::ConsumeArgs),
    /// List, show, create, alter, pause and drop consumer groups
    #[command(subcommand)]
    Group(group::GroupCommand),
    /// List, show, redrive and discard dead letters
    #[command(subcommand)]
    Dead(dead::DeadCommand),
    /// List and cancel messages that are not due yet
    #[command(subcommand)]
    Delayed(delayed::DelayedCommand),
    /// Look up, list and remove the current values of a compacted stream
    #[command(subcommand)]
    Message(message::MessageCommand),
    /// Measure what is promised; kill and freeze consumers and count what got lost
    #[command(subcommand)]
    Bench(BenchCommand),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }
}
