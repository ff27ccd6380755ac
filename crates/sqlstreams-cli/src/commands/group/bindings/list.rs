//! `sqlstreams group bindings STREAM GROUP`.

use serde_json::{Value, json};

use super::to_json;
use crate::commands::open_group;
use crate::context::Context;
use crate::output::{print, print_json, print_table, printable, table};

pub(super) async fn run(stream: &str, group: &str, context: &Context) -> anyhow::Result<()> {
    let group = open_group(&context.reader().await?, stream, group).await?;
    let bindings = group.bindings().await?;
    if context.json() {
        let list = Value::from_iter(bindings.iter().map(to_json));
        return print_json(&json!({"stream": stream, "group": group.name(), "bindings": list}));
    }
    if bindings.is_empty() {
        return print("no bindings: the group receives everything");
    }
    let mut rows = table(&["PATTERN", "HEADERS"]);
    for binding in &bindings {
        let headers = binding.header_conditions();
        let headers = match headers.is_empty() {
            true => String::new(),
            false => printable(&Value::from(headers.clone()).to_string(), 200),
        };
        rows.add_row([printable(binding.pattern().unwrap_or_default(), 255), headers]);
    }
    print_table(&rows)
}
