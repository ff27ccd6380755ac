//! Logs of any size, quickly.

use sqlstreams::Stream;

use crate::bench::place::{Place, Tables};
use crate::context::Context;
use crate::progress::Progress;

/// Messages per transaction.
const BATCH: u64 = 200_000;

/// Writes so many messages into an empty log, on the server itself.
pub(crate) async fn fill(
    context: &Context,
    place: &Place<i64>,
    stream: &Stream<i64>,
    messages: u64,
) -> anyhow::Result<()> {
    let log = Tables::in_schema(context.schema(), &format!("message_log_{}", stream.id()));
    let ensure = Tables::in_schema(context.schema(), "ensure_partitions");
    let progress = Progress::new(context, Some(messages), "messages");
    let mut done = 0;
    while done < messages {
        let batch = BATCH.min(messages - done);
        place.db.query(&format!("SELECT {ensure}($1)"), &[&stream.id()]).await?;
        let insert = format!(
            "INSERT INTO {log} (payload) SELECT to_json(n) FROM generate_series($1::bigint, $2) AS n"
        );
        place.db.execute(&insert, &[&(done as i64 + 1), &((done + batch) as i64)]).await?;
        done += batch;
        progress.update(done, done);
    }
    progress.clear();
    // As a log is that has been there for a while.
    place.db.batch_execute(&format!("VACUUM ANALYZE {log}")).await?;
    Ok(())
}
