//! Options for how long messages are kept, and how that is shown.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use sqlstreams::{HoldReason, Retention, RetentionHold, StreamInfo};

use crate::output::{printable, short_time, span, thousands, time};
use crate::values::{self, Limit};

#[derive(Debug, Default, Args)]
pub(crate) struct RetentionArgs {
    /// Keep what is newer than this: 7d; none: for ever
    #[arg(long, value_name = "DURATION", group = "setting", value_parser = values::limit_of(values::duration))]
    retain_for: Option<Limit<Duration>>,
    /// Keep the newest so many bytes on disk: 500MB, 10GB, 1TiB; none: all
    #[arg(long, value_name = "SIZE", group = "setting", value_parser = values::limit_of(values::size))]
    retain_bytes: Option<Limit<u64>>,
    /// Keep the newest so many ids; none: all
    #[arg(long, value_name = "IDS", group = "setting", value_parser = values::limit_of(values::number))]
    retain_count: Option<Limit<u64>>,
    /// Whether messages go as soon as every group has resolved them: on or off
    #[arg(long, value_name = "ON|OFF", group = "setting", value_parser = values::on_or_off)]
    retain_until_resolved: Option<bool>,
    /// Whether messages beyond a limit go though a group has not resolved them: on or off
    #[arg(long, value_name = "ON|OFF", group = "setting", value_parser = values::on_or_off)]
    drop_unread: Option<bool>,
    /// How long dead letters are kept; none: until they are redriven or discarded
    #[arg(long, value_name = "DURATION", group = "setting", value_parser = values::limit_of(values::duration))]
    retain_dead_for: Option<Limit<Duration>>,
}

impl RetentionArgs {
    /// What becomes of these settings; `None` if it is the same.
    pub(crate) fn change(&self, old: &Retention) -> Option<Retention> {
        let mut new = old.clone();
        if let Some(Limit(age)) = self.retain_for {
            new.age = age;
        }
        if let Some(Limit(bytes)) = self.retain_bytes {
            new.bytes = bytes;
        }
        if let Some(Limit(count)) = self.retain_count {
            new.count = count;
        }
        if let Some(Limit(dead)) = self.retain_dead_for {
            new.dead = dead;
        }
        new.resolved = self.retain_until_resolved.unwrap_or(new.resolved);
        new.unread = self.drop_unread.unwrap_or(new.unread);
        (new != *old).then_some(new)
    }

    pub(crate) fn is_given(&self) -> bool {
        self.retain_for.or(self.retain_dead_for).is_some()
            || self.retain_bytes.or(self.retain_count).is_some()
            || self.retain_until_resolved.or(self.drop_unread).is_some()
    }
}

/// `7d` where [`span`] has `168h`.
fn days(age: Duration) -> String {
    const DAY: u64 = 24 * 60 * 60;
    match age.as_secs() {
        seconds if seconds >= DAY && age == Duration::from_secs(seconds / DAY * DAY) => {
            format!("{}d", seconds / DAY)
        }
        _ => span(age),
    }
}

/// `7d, 10,000,000,000 bytes, unread ones too; dead letters 30d`.
pub(crate) fn describe(retention: &Retention) -> String {
    let mut limits = Vec::new();
    limits.extend(retention.age.map(days));
    limits.extend(retention.bytes.map(|bytes| format!("{} bytes", thousands(bytes))));
    limits.extend(retention.count.map(|ids| format!("{} ids", thousands(ids))));
    if retention.resolved {
        limits.push("until resolved".to_owned());
    }
    if limits.is_empty() {
        limits.push("for ever".to_owned());
    } else if retention.unread {
        limits.push("unread or not".to_owned());
    }
    let dead = retention.dead.map(|age| format!("; dead letters {}", days(age)));
    limits.join(", ") + &dead.unwrap_or_default()
}

/// What holds it up, in a line.
pub(crate) fn held(hold: &RetentionHold) -> String {
    let since = short_time(hold.since);
    let detail = printable(hold.detail.as_deref().unwrap_or("a session"), 500);
    match (hold.reason, &hold.group) {
        (HoldReason::Group, Some(group)) => format!(
            "since {since} by group {}, which has resolved up to id {}{}",
            printable(group, 200),
            hold.resolved.map_or_else(|| "?".to_owned(), thousands),
            // What cannot be dropped, beside it.
            hold.detail.as_ref().map(|_| format!("; {detail}")).unwrap_or_default()
        ),
        (HoldReason::Detach, _) => format!("since {since} by what has the log open: {detail}"),
        (HoldReason::Privilege, _) => format!("since {since}: {detail}"),
        (HoldReason::Depends, _) => {
            format!(
                "since {since} by what is made of a partition, which has to be dropped: {detail}"
            )
        }
        (reason, _) => format!("since {since}: {} {detail}", reason.as_str()),
    }
}

/// Where the partitions are too large for the limits to make sense.
pub(crate) fn advice(info: &StreamInfo) -> Option<String> {
    let size = info.partition_size.unsigned_abs();
    let count = info.retention.count.filter(|count| *count < size)?;
    Some(format!(
        "a partition takes {} ids, and goes when it is full and {} more have come: up to {} are kept",
        thousands(size),
        thousands(count),
        thousands(size + count)
    ))
}

pub(crate) fn to_json(info: &StreamInfo) -> Value {
    let Retention { age, bytes, count, resolved, unread, dead, .. } = &info.retention;
    json!({
        "retain_for_seconds": age.map(|age| age.as_secs_f64()),
        "retain_bytes": bytes,
        "retain_count": count,
        "retain_until_resolved": resolved,
        "drop_unread": unread,
        "retain_dead_for_seconds": dead.map(|age| age.as_secs_f64()),
        "hold": info.hold.as_ref().map(hold_json),
    })
}

pub(crate) fn hold_json(hold: &RetentionHold) -> Value {
    json!({
        "reason": hold.reason.as_str(),
        "group": hold.group,
        "resolved": hold.resolved,
        "since": time(hold.since),
        "detail": hold.detail,
    })
}
