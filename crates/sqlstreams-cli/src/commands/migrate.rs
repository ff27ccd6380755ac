//! `sqlstreams migrate`.

use clap::Args;
use serde_json::json;
use sqlstreams::Client;

use crate::context::Context;
use crate::output::{print, print_json};

const AFTER_HELP: &str = "\
`stream create`, and `produce` and `stream import` with --create, install the schema by themselves;
these and other commands that write to streams bring an older one up to date. Run it first where
they may not: with a role that may create a schema, say, before a service starts with a lesser one.
Any number of processes may run it at once.

Examples:
  sqlstreams migrate
  sqlstreams migrate --schema billing --database-url postgres://owner@db/shop";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct MigrateArgs {}

pub(crate) async fn run(_args: MigrateArgs, context: &Context) -> anyhow::Result<()> {
    let url = context.database_url().await?;
    let (_, report) = Client::builder(&url).schema(context.schema()).connect_and_migrate().await?;
    if context.json() {
        return print_json(&json!({
            "schema": context.schema(),
            "from": report.from,
            "to": report.to,
            "changed": report.changed,
        }));
    }
    let (schema, to) = (context.schema(), report.to);
    match report.from {
        None => print(format_args!("installed version {to} in schema {schema:?}")),
        Some(from) if from != to => {
            print(format_args!("brought schema {schema:?} from version {from} to {to}"))
        }
        Some(_) if report.changed => {
            print(format_args!("renewed the functions of schema {schema:?}, version {to}"))
        }
        Some(_) => print(format_args!("schema {schema:?} is up to date, version {to}")),
    }
}
