//! Doing the same to many dead letters, in batches.

use serde_json::json;
use sqlstreams::{Bytes, Group};

use super::Chosen;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{counted, print, print_json};
use crate::progress::Progress;

/// How many one transaction takes.
const BATCH: usize = 1_000;

/// What is done to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Deed {
    Redrive,
    Discard,
}

impl Deed {
    fn done(self) -> &'static str {
        match self {
            Self::Redrive => "redriven",
            Self::Discard => "discarded",
        }
    }
}

pub(super) async fn run(
    deed: Deed,
    group: &Group<Vec<u8>, Bytes>,
    chosen: &Chosen,
    context: &Context,
) -> anyhow::Result<()> {
    let mut ids = chosen.ids.clone();
    ids.sort_unstable();
    ids.dedup();
    // Not "until there are none": what is redriven may die again meanwhile, and this would never end.
    let total = match chosen.all {
        true => group.count_dead_letters().await?,
        false => ids.len() as u64,
    };
    let progress = Progress::new(context, Some(total), deed.done());
    let mut done: Vec<i64> = Vec::new();
    let mut count = 0;
    if chosen.all {
        while count < total {
            let batch = i64::try_from(total - count).unwrap_or(i64::MAX).min(BATCH as i64);
            let found = apply(deed, group, None, batch).await?;
            if found.is_empty() {
                break;
            }
            count += found.len() as u64;
            progress.update(count, count);
        }
    } else {
        for batch in ids.chunks(BATCH) {
            done.extend(apply(deed, group, Some(batch), BATCH as i64).await?);
            count = done.len() as u64;
            progress.update(count, count);
        }
    }
    progress.clear();
    done.sort_unstable();
    ids.retain(|id| done.binary_search(id).is_err());
    let others: Vec<String> = ids.iter().take(10).map(i64::to_string).collect();
    let more = if ids.len() > 10 { ", …" } else { "" };
    let not_dead =
        format!("not dead letters of group {:?}: {}{more}", group.name(), others.join(", "));
    if count == 0 && !ids.is_empty() {
        return Err(Failure::not_found("unknown_dead_letter", not_dead)
            .hint("`sqlstreams dead list` shows those that there are.")
            .into());
    }
    if context.json() {
        return print_json(&json!({deed.done(): count, "not_dead": ids}));
    }
    if !ids.is_empty() {
        context.say(&not_dead);
    }
    print(format_args!("{} {}", counted(count, "dead letter"), deed.done()))
}

async fn apply(
    deed: Deed,
    group: &Group<Vec<u8>, Bytes>,
    ids: Option<&[i64]>,
    limit: i64,
) -> sqlstreams::Result<Vec<i64>> {
    match deed {
        Deed::Redrive => group.redrive(ids, limit).await,
        Deed::Discard => group.discard(ids, limit).await,
    }
}
