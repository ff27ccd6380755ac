//! `sqlstreams message current`.

use clap::Args;
use serde_json::Value;

use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{print, print_json, print_table, printable, short_time, table};
use crate::payload;

const AFTER_HELP: &str = "\
Of each key the newest message, unless the key was removed or that has expired. Keys are sorted byte
by byte; --after goes on after a key, the last one of the page before.

Examples:
  sqlstreams message current prices
  sqlstreams message current prices --after apples --limit 1000
  sqlstreams message current prices --json | jq -r '.[] | [.key, .payload] | @tsv'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CurrentArgs {
    /// The stream, a compacted one
    stream: String,
    /// Only keys after this one
    #[arg(long, value_name = "KEY")]
    after: Option<String>,
    /// How many at most
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
}

pub(crate) async fn run(args: CurrentArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.stream).await?;
    let limit = args.limit as usize;
    let (mut messages, mut next) = (Vec::new(), args.after);
    // A page may end before it is full.
    loop {
        let rest = u32::try_from(limit - messages.len()).unwrap_or(u32::MAX);
        let page = stream.current(next.as_deref(), rest).await?;
        messages.extend(page.messages);
        next = page.next;
        if next.is_none() || messages.len() == limit {
            break;
        }
    }
    let payload_type = stream.payload_type();
    if context.json() {
        let rows = messages.iter().map(|message| super::to_json(message, payload_type));
        return print_json(&Value::from_iter(rows));
    }
    if messages.is_empty() {
        return print("no current values");
    }
    let mut rows = table(&["KEY", "#ID", "PRODUCED", "PAYLOAD"]);
    for message in &messages {
        rows.add_row([
            printable(message.key.as_deref().unwrap_or_default(), 60),
            message.id.to_string(),
            short_time(message.produced_at),
            printable(&payload::to_text(&message.payload, payload_type), 60),
        ]);
    }
    print_table(&rows)?;
    if next.is_some() {
        context.say("there may be more: go on with --after and the last key, or raise --limit");
    }
    Ok(())
}
