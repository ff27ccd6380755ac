//! `sqlstreams stream show`.

use clap::Args;
use serde_json::Value;

use super::retention;
use crate::commands::{group, open_stream};
use crate::context::Context;
use crate::output::{
    on_or_off, print, print_json, print_table, printable, short_time, span, thousands,
};

const AFTER_HELP: &str = "\
`delayed` counts the messages that are not due yet; `kept` says for how long messages are kept, and from which
id on they still are; `held up` what keeps those that are to go from going. With --json, `groups` holds the groups as `sqlstreams group list` shows them.

Examples:
  sqlstreams stream show orders
  sqlstreams stream show orders --json | jq '.groups[].lag'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ShowArgs {
    /// The stream
    name: String,
}

pub(crate) async fn run(args: ShowArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.name).await?;
    let info = stream.info().await?;
    let groups = stream.groups().await?;
    let delayed = stream.count_delayed().await?;
    if context.json() {
        let mut document = super::to_json(&info);
        document["delayed"] = delayed.into();
        document["groups"] = Value::from_iter(groups.iter().map(group::to_json));
        return print_json(&document);
    }
    print(format_args!(
        "stream {}\n  payloads   {}\n  head       {}\n  delayed    {}\n  notify     {}\n  compacted  {}\n  kept       {}, from id {} on{}\n  idempotency keys are remembered for {}\n  groups expire {}\n  created    {}\n  tables     message_log_{} and so on, {} ids per partition\n",
        printable(&info.name, 200),
        info.payload_type,
        thousands(info.head),
        thousands(delayed),
        on_or_off(info.notify),
        if info.compacted { "yes" } else { "no" },
        retention::describe(&info.retention),
        thousands(info.first_id),
        info.hold
            .as_ref()
            .map(|hold| format!("\n  held up    {}", retention::held(hold)))
            .unwrap_or_default(),
        span(info.idempotency_window),
        info.group_expiry.map_or_else(
            || "never".to_owned(),
            |after| format!("{} after the last sign of life", span(after))
        ),
        short_time(info.created_at),
        info.id,
        thousands(info.partition_size),
    ))?;
    match groups.is_empty() {
        true => print("no groups yet"),
        false => print_table(&group::to_table(&groups)),
    }
}
