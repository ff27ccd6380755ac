//! `sqlstreams group bindings test`.

use clap::Args;
use serde_json::{Value, json};
use sqlstreams::{Binding, Headers};

use super::to_json;
use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{print, print_json, print_table, printable, table};
use crate::values;

const AFTER_HELP: &str = "\
Tells for a message that would be sent now. Nothing is sent.

Examples:
  sqlstreams group bindings test orders --routing-key orders.eu.created
  sqlstreams group bindings test orders --headers '{\"region\": \"eu\"}'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct TestArgs {
    /// The stream
    stream: String,
    /// The message's routing key; none without
    #[arg(long, value_name = "KEY")]
    routing_key: Option<String>,
    /// The message's headers, a JSON object
    #[arg(long, value_name = "JSON", value_parser = values::headers, default_value = "{}")]
    headers: Headers,
}

pub(super) async fn run(args: TestArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.stream).await?;
    let reached = stream.test_bindings(args.routing_key.as_deref(), &args.headers).await?;
    if context.json() {
        return print_json(&Value::from_iter(reached.iter().map(|reached| {
            json!({"group": reached.group, "binding": reached.binding.as_ref().map(to_json)})
        })));
    }
    if reached.is_empty() {
        return print("no group would receive it");
    }
    let mut rows = table(&["GROUP", "BY"]);
    for reached in &reached {
        let by = reached.binding.as_ref().map(Binding::to_string);
        let by = by.unwrap_or_else(|| "no bindings: it receives everything".to_owned());
        rows.add_row([printable(&reached.group, 60), printable(&by, 255)]);
    }
    print_table(&rows)
}
