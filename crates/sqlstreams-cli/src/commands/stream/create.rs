//! `sqlstreams stream create`.

use std::time::Duration;

use clap::{ArgGroup, Args};
use sqlstreams::{Bytes, PayloadType, Retention};

use super::retention::{self, RetentionArgs};

use crate::context::Context;
use crate::output::{print, print_json};
use crate::values;

const AFTER_HELP: &str = "\
Payload types, which a stream keeps for good:
  json   JSON, checked and kept byte for byte (default)
  jsonb  JSON in PostgreSQL's decomposed form: faster to query, spelling and key order are lost
  text   any UTF-8 text
  bytea  any bytes

What is kept for how long, for ever if nothing is said: see `stream alter --help`.

Examples:
  sqlstreams stream create orders
  sqlstreams stream create audit --notify
  sqlstreams stream create prices --compacted
  sqlstreams stream create clicks --retain-for 7d --retain-bytes 50GB
  sqlstreams stream create 'web logs' --payload-type text --partition-size 5000000";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
#[command(group = ArgGroup::new("setting").multiple(true))]
pub(crate) struct CreateArgs {
    /// The name: any text of 1 to 200 bytes
    name: String,
    /// How payloads are stored: json, jsonb, text or bytea
    #[arg(long, value_name = "TYPE", default_value = "json", value_parser = values::payload_type)]
    payload_type: PayloadType,
    /// Ids per partition of the log
    #[arg(long, value_name = "IDS", default_value_t = 1_000_000)]
    partition_size: i64,
    /// Wake consumers from inside every transaction that inserts: see `stream alter --help`
    #[arg(long)]
    notify: bool,
    /// How long to remember idempotency keys, 5m to 365d
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = values::duration)]
    idempotency_window: Duration,
    /// Keep only the newest message of each key for good: see `message --help` and `stream compact`
    #[arg(long)]
    compacted: bool,
    #[command(flatten)]
    retention: RetentionArgs,
}

pub(crate) async fn run(args: CreateArgs, context: &Context) -> anyhow::Result<()> {
    let stream = context
        .writer()
        .await?
        .stream::<Vec<u8>>(args.name)
        .codec::<Bytes>()
        .payload_type(args.payload_type)
        .partition_size(args.partition_size)
        .notify(args.notify)
        .idempotency_window(args.idempotency_window)
        .compacted(args.compacted)
        .retention(args.retention.change(&Retention::forever()).unwrap_or_default())
        .create()
        .await?;
    if context.json() {
        return print_json(&super::to_json(&stream.info().await?));
    }
    if args.retention.is_given()
        && let Some(advice) = retention::advice(&stream.info().await?)
    {
        context.say(&advice);
    }
    print(format_args!("created stream {:?} for {}", stream.name(), stream.payload_type()))
}
