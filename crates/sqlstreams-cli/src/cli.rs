//! The command line: options that all commands share, and the list of commands.

use std::any::TypeId;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Arg, ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use sqlstreams::Start;

use crate::bench::BenchCommand;
use crate::commands::{
    consume, dead, delayed, doctor, down, group, maintain, message, migrate, produce, schedule,
    stream, up,
};
use crate::demo::DemoArgs;
use crate::failure::Failure;
use crate::prose;
use crate::values::Limit;

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
  3    a stream, group, schedule or dead letter that was named does not exist
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
    /// DATABASE_URL, PGPASSWORD or ~/.pgpass: others can see command lines [env: DATABASE_URL]
    #[arg(long, global = true, value_name = "URL")]
    pub(crate) database_url: Option<String>,
    /// The schema that holds the streams [env: SQLSTREAMS_SCHEMA] [default: sqlstreams]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) schema: Option<String>,
    /// The folder with PostgreSQL's programs, for `up`, `demo` and `bench` [env: SQLSTREAMS_PG_BIN]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) pg_bin: Option<PathBuf>,
    /// The folder where `up` keeps its PostgreSQL [env: SQLSTREAMS_UP_DIR]
    #[arg(long, global = true, value_name = "DIR")]
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
    /// Create, list, show, alter, export, import and drop streams
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
    /// Do the upkeep of all streams, once or until it is stopped, or see what came of it
    Maintain(maintain::MaintainArgs),
    /// Create, list, show, alter, pause, run and drop schedules
    #[command(subcommand)]
    Schedule(schedule::ScheduleCommand),
    /// Say what is wrong with an installation, and repair it: after a restore, for one
    Doctor(doctor::DoctorArgs),
    /// Measure what is promised; kill and freeze consumers and count what got lost
    #[command(subcommand)]
    Bench(BenchCommand),
}

impl Cli {
    /// What the command line says, completed by the environment.
    pub(crate) fn read() -> Result<Result<Self, Failure>, clap::Error> {
        let mut definition = definition();
        let matches = definition.try_get_matches_from_mut(std::env::args_os())?;
        let cli = Self::from_arg_matches(&matches).map_err(|e| e.format(&mut definition))?;
        Ok(cli.global.with_environment().map(|global| Self { global, ..cli }))
    }
}

impl Global {
    /// Not by clap, whose usage lines would show what the environment has as if it had to be given.
    fn with_environment(mut self) -> Result<Self, Failure> {
        self.database_url = or_variable(self.database_url, "DATABASE_URL")?;
        self.schema = or_variable(self.schema, "SQLSTREAMS_SCHEMA")?;
        self.pg_bin = self.pg_bin.or_else(|| variable("SQLSTREAMS_PG_BIN").map(PathBuf::from));
        self.up_dir = self.up_dir.or_else(|| variable("SQLSTREAMS_UP_DIR").map(PathBuf::from));
        Ok(self)
    }
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn or_variable(given: Option<String>, name: &str) -> Result<Option<String>, Failure> {
    let value = given.is_none().then(|| variable(name)).flatten();
    match value.map(OsString::into_string).transpose() {
        Ok(value) => Ok(given.or(value)),
        Err(_) => Err(Failure::usage("usage", format!("{name} is not UTF-8"))),
    }
}

fn definition() -> clap::Command {
    polish(Cli::command())
}

/// What holds for all commands and would else have to be said with each.
fn polish(command: clap::Command) -> clap::Command {
    let command = command.mut_args(take_minus).mut_subcommands(polish);
    match command.get_after_help().map(ToString::to_string) {
        Some(text) => command.after_help(prose::join_lines(&text)),
        None => command,
    }
}

/// Numbers and times may begin with a minus: their own parsers say better than clap what is wrong with that.
fn take_minus(arg: Arg) -> Arg {
    let of = arg.get_value_parser().type_id();
    let is_time = of == TypeId::of::<Duration>()
        || of == TypeId::of::<SystemTime>()
        || of == TypeId::of::<(SystemTime, i64)>()
        || of == TypeId::of::<Start>()
        || of == TypeId::of::<Limit<Duration>>();
    let is_number = of == TypeId::of::<u8>()
        || of == TypeId::of::<u16>()
        || of == TypeId::of::<u32>()
        || of == TypeId::of::<u64>()
        || of == TypeId::of::<Limit<u64>>()
        || of == TypeId::of::<usize>()
        || of == TypeId::of::<i64>()
        || of == TypeId::of::<f64>();
    // A flag's count takes no value.
    match arg.get_action().takes_values() {
        true if is_time => arg.allow_hyphen_values(true),
        true if is_number => arg.allow_negative_numbers(true),
        _ => arg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        definition().debug_assert();
    }
}
