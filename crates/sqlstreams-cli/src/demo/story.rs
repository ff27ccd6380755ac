//! The demo from the first order to the last check.

use std::time::Instant;

use super::facts::{Facts, Server};
use super::report::Report;
use super::stage::Stage;
use super::{live, redrive, replay, transaction};

/// Runs the steps and reports each as soon as it is done.
pub(crate) async fn tell(
    stage: &mut Stage,
    report: &Report,
    server: Server,
) -> anyhow::Result<Facts> {
    let started = Instant::now();
    let live = live::run(stage).await?;
    report.live(&live.produced, &live.groups)?;
    report.state_rows(&live.produced, &live.groups)?;
    let dead_letters = redrive::look(stage).await?;
    report.dead_letters(&dead_letters)?;
    let redrive = redrive::run(stage, &live.payments).await?;
    report.redrive(&redrive)?;
    let replay = replay::run(stage).await?;
    report.replay(&replay)?;
    let transaction = transaction::run(stage, &live.receipts).await?;
    report.transaction(&transaction)?;
    Ok(Facts {
        sqlstreams: env!("CARGO_PKG_VERSION"),
        postgresql: server,
        stream: stage.stream.name().to_owned(),
        produced: live.produced,
        groups: live.groups,
        dead_letters,
        redrive,
        replay,
        transaction,
        checks: stage.checks.held(),
        seconds: started.elapsed().as_secs_f64(),
    })
}
