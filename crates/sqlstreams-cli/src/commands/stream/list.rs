//! `sqlstreams stream list`.

use clap::Args;
use serde_json::Value;

use super::retention;
use crate::context::Context;
use crate::output::{
    on_or_off, print, print_json, print_table, printable, short_time, table, thousands,
};

const AFTER_HELP: &str = "\
Columns: HEAD is the id of the newest message, an upper bound of how many there were; NOTIFY is on
where every insert wakes consumers; KEPT says for how long messages are kept (`stream alter`), with a star
where something keeps those that are to go from going (`stream show`).

Examples:
  sqlstreams stream list
  sqlstreams stream list --json | jq -r '.[].name'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ListArgs {}

pub(crate) async fn run(_args: ListArgs, context: &Context) -> anyhow::Result<()> {
    let streams = context.reader().await?.streams().await?;
    if context.json() {
        return print_json(&Value::from_iter(streams.iter().map(super::to_json)));
    }
    if streams.is_empty() {
        return print("no streams yet; create one with `sqlstreams stream create NAME`");
    }
    let mut rows = table(&["NAME", "PAYLOAD", "#HEAD", "#GROUPS", "NOTIFY", "KEPT", "CREATED"]);
    for stream in &streams {
        rows.add_row([
            printable(&stream.name, 60),
            stream.payload_type.to_string(),
            thousands(stream.head),
            thousands(stream.groups),
            on_or_off(stream.notify),
            format!(
                "{}{}",
                retention::describe(&stream.retention),
                if stream.hold.is_some() { " *" } else { "" }
            ),
            short_time(stream.created_at),
        ]);
    }
    print_table(&rows)
}
