//! `sqlstreams delayed list`.

use std::time::SystemTime;

use clap::Args;
use serde_json::{Value, json};
use sqlstreams::{Delayed, PayloadType};

use crate::commands::open_stream;
use crate::context::Context;
use crate::output::{
    print, print_json, print_table, printable, short_time, table, thousands, time,
};
use crate::payload;
use crate::values;

const AFTER_HELP: &str = "\
The first due first; --after goes on after one, as a page that is full says. The ids are those by
which `delayed cancel` takes messages back; in the stream they get others, when they are due.

Examples:
  sqlstreams delayed list orders
  sqlstreams delayed list orders --limit 10000 --json | jq -r '.[] | [.id, .deliver_at] | @tsv'";

#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ListArgs {
    /// The stream
    stream: String,
    /// How many at most
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Only those after this one: its time and its id, 2026-03-01T12:00:00Z/17
    #[arg(long, value_name = "TIME/ID", value_parser = values::due)]
    after: Option<(SystemTime, i64)>,
}

/// Messages read per call.
const PAGE: u32 = 1_000;

pub(crate) async fn run(args: ListArgs, context: &Context) -> anyhow::Result<()> {
    let stream = open_stream(&context.reader().await?, &args.stream).await?;
    let limit = args.limit as usize;
    let (mut delayed, mut after) = (Vec::<Delayed<Vec<u8>>>::new(), args.after);
    while delayed.len() < limit {
        let rest = u32::try_from(limit - delayed.len()).unwrap_or(PAGE).min(PAGE);
        let page = stream.delayed(after, rest).await?;
        let full = page.len() == rest as usize;
        delayed.extend(page);
        after = delayed.last().map(|last| (last.deliver_at, last.id));
        if !full {
            break;
        }
    }
    let payload_type = stream.payload_type();
    if context.json() {
        let rows = delayed.iter().map(|message| to_json(message, payload_type));
        return print_json(&Value::from_iter(rows));
    }
    let Some(last) = delayed.last() else {
        return print(match args.after {
            None => "no delayed messages",
            Some(_) => "no more delayed messages",
        });
    };
    let mut rows = table(&["#ID", "DUE", "SENT", "KEY", "PAYLOAD"]);
    for message in &delayed {
        rows.add_row([
            message.id.to_string(),
            short_time(message.deliver_at),
            short_time(message.sent_at),
            printable(message.key.as_deref().unwrap_or("-"), 30),
            printable(&payload::to_text(&message.payload, payload_type), 60),
        ]);
    }
    print_table(&rows)?;
    if delayed.len() == args.limit as usize {
        let all = stream.count_delayed().await?;
        context.say(&format!(
            "{} shown of {}; for more: --after '{}/{}' or a higher --limit",
            thousands(args.limit),
            thousands(all),
            time(last.deliver_at),
            last.id
        ));
    }
    Ok(())
}

fn to_json(message: &Delayed<Vec<u8>>, payload_type: PayloadType) -> Value {
    json!({
        "id": message.id,
        "deliver_at": time(message.deliver_at),
        "sent_at": time(message.sent_at),
        "expires_at": message.expires_at.map(time),
        "key": message.key,
        "routing_key": message.routing_key,
        "headers": message.headers,
        "payload": payload::to_value(&message.payload, payload_type),
    })
}
