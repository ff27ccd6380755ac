//! The second step: the dead letters, and what becomes of them once the handler is fixed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use sqlstreams::Exception;

use super::facts::{DeadLetter, DeadLetters, ErrorCount, Pace, Redrive};
use super::payments::Payments;
use super::stage::{PAYMENTS, Stage, payments_handler};
use super::tally::Tally;
use super::trouble::Trouble;

/// Dead letters read or redriven per call.
const PAGE: i64 = 1_000;
/// Examples of each error.
const EXAMPLES: u64 = 2;

/// Reads the dead letters.
pub(crate) async fn look(stage: &mut Stage) -> anyhow::Result<DeadLetters> {
    let mut counts = BTreeMap::<String, u64>::new();
    let mut examples = Vec::new();
    let (mut count, mut after) = (0, 0);
    loop {
        let page = stage.payments.dead_letters(after, PAGE).await?;
        let Some(last) = page.last() else { break };
        after = last.message_id;
        count += page.len() as u64;
        for letter in page {
            let error = letter.last_error.clone().unwrap_or_default();
            let seen = counts.entry(error).or_default();
            *seen += 1;
            if *seen <= EXAMPLES {
                examples.push(example(letter));
            }
        }
    }
    let dying = (1..=stage.orders)
        .filter_map(Trouble::of)
        .filter(|trouble| trouble.recovers_at().is_none())
        .count() as u64;
    stage.checks.equal("dead letters listed", count, dying)?;
    let mut errors: Vec<ErrorCount> =
        counts.into_iter().map(|(error, count)| ErrorCount { error, count }).collect();
    errors.sort_by_key(|error| std::cmp::Reverse(error.count));
    Ok(DeadLetters { group: PAYMENTS, count, errors, examples })
}

/// Puts all of them back to work, with a handler that can deal with them.
pub(crate) async fn run(stage: &mut Stage, tally: &Arc<Tally>) -> anyhow::Result<Redrive> {
    let receipts_before = stage.receipts.status().await?;
    let log_before = stage.tables.log().await?;
    let handled_before = tally.handled();
    let given_up = tally.given_up();

    let started = Instant::now();
    let mut redriven = 0;
    loop {
        match stage.payments.redrive(None, PAGE).await?.len() {
            0 => break,
            some => redriven += some as u64,
        }
    }
    let handler = payments_handler(tally, Payments::fixed());
    stage.payments.consumer().until_caught_up().run(handler).await?;
    let time = started.elapsed();

    let status = stage.payments.status().await?;
    let state_rows = stage.tables.state_rows(stage.payments.id()).await?;
    let log_after = stage.tables.log().await?;
    let handled = tally.handled() - handled_before;
    let receipts_after = stage.receipts.status().await?;
    let checks = &mut stage.checks;
    checks.equal("dead letters redriven", redriven, given_up)?;
    checks.equal("redriven orders handled", handled, given_up)?;
    checks.equal("payments handled in the end", tally.handled(), stage.orders)?;
    checks.equal("dead letters after the redrive", status.dead, 0)?;
    checks.equal("state rows of payments after the redrive", state_rows.all(), 1)?;
    checks.equal("messages in the log after the redrive", log_after.rows, log_before.rows)?;
    checks.equal("receipts after the redrive of payments", receipts_after, receipts_before)?;
    Ok(Redrive {
        redriven,
        pace: Pace::new(handled, time),
        dead_after: status.dead,
        state_rows_after: state_rows,
        log_rows_before: log_before.rows,
        log_rows_after: log_after.rows,
    })
}

fn example(letter: Exception) -> DeadLetter {
    DeadLetter {
        message_id: letter.message_id,
        key: letter.key,
        attempts: letter.attempts,
        error: letter.last_error.unwrap_or_default(),
    }
}
