//! What a statement reads, in buffers of the server, which do not depend on the machine.

use tokio_postgres::{Client, SimpleQueryMessage};

/// The buffers that one statement reads.
pub async fn buffers(db: &Client, sql: &str) -> i64 {
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {sql}");
    let answer = db.simple_query(&explain).await.unwrap();
    let plan = answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    let plan: serde_json::Value = serde_json::from_str(plan.unwrap()).unwrap();
    let read = |kind: &str| plan[0]["Plan"][kind].as_i64().unwrap();
    read("Shared Hit Blocks") + read("Shared Read Blocks")
}

/// The middle one: for calls that read the same each time. One that reads the catalogue as well is not the call's fault.
pub fn middle(mut samples: Vec<i64>) -> f64 {
    samples.sort_unstable();
    samples[samples.len() / 2] as f64
}

/// The average, for calls that read somewhat more at some times than at others; without those that read the catalogue as well. The whole of
/// it is some 2,000 buffers, and each statement reads its part; it happens in the first call of a session, after a vacuum, and whenever
/// other sessions, also of other databases, change so much of the catalogue at once that the server tells this one to forget it.
pub fn average(samples: Vec<i64>) -> f64 {
    let most = middle(samples.clone()) as i64 * 3 + 50;
    let usual: Vec<i64> = samples.into_iter().filter(|sample| *sample < most).collect();
    usual.iter().sum::<i64>() as f64 / usual.len() as f64
}
