//! `sqlstreams group bindings history`.

use clap::Args;
use serde_json::{Value, json};
use sqlstreams::Binding;

use super::to_json;
use crate::commands::open_group;
use crate::context::Context;
use crate::output::{
    print, print_json, print_table, printable, short_time, table, thousands, time,
};

const AFTER_HELP: &str = "\
Each change holds for ids above AFTER, up to that of the next one. The last hundred are kept; table
audit of the schema remembers all.

Examples:
  sqlstreams group bindings history orders receipts
  sqlstreams group bindings history orders receipts --json | jq '.[-1]'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct HistoryArgs {
    /// The stream
    stream: String,
    /// The group
    group: String,
}

pub(super) async fn run(args: HistoryArgs, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, &args.stream, &args.group).await?;
    let history = group.binding_history().await?;
    if context.json() {
        return print_json(&Value::from_iter(history.iter().map(|set| {
            json!({
                "version": set.version,
                "after_id": set.after_id,
                "bindings": Value::from_iter(set.bindings.iter().map(to_json)),
                "changed_at": time(set.changed_at),
                "changed_by": set.changed_by,
            })
        })));
    }
    if history.is_empty() {
        return print("no bindings yet: the group receives everything");
    }
    let mut rows = table(&["#AFTER", "CHANGED", "BY", "BINDINGS"]);
    for set in &history {
        let bindings: Vec<String> = set.bindings.iter().map(Binding::to_string).collect();
        let bindings = if bindings.is_empty() { "none".to_owned() } else { bindings.join("  ") };
        rows.add_row([
            thousands(set.after_id),
            short_time(set.changed_at),
            printable(&set.changed_by, 60),
            printable(&bindings, 200),
        ]);
    }
    print_table(&rows)
}
