//! Retry arithmetic: delays stay between nothing and the cap, whatever the numbers.

use crate::plain::installed;
use crate::support::{count, database};

#[tokio::test]
async fn tb_083_delays_are_capped_and_never_negative() {
    let plain = installed(&database().await).await;
    for factor in ["1", "1.0000001", "2", "10", "1000"] {
        for base in ["0", "1 microsecond", "1 second", "365 days"] {
            for cap in ["0", "1 second", "5 minutes", "365 days"] {
                plain
                    .db
                    .batch_execute(&format!(
                        "UPDATE sqlstreams.consumer_group SET backoff_base = '{base}', backoff_factor = {factor}, backoff_cap = '{cap}'"
                    ))
                    .await
                    .unwrap();
                let wrong = count(
                    &plain.db,
                    "SELECT count(*) FROM sqlstreams.consumer_group AS g,
                         unnest(ARRAY[-2147483648, -1, 0, 1, 2, 31, 64, 310, 1024, 100000, 2147483646, 2147483647]) AS attempts,
                         generate_series(1, 20),
                         LATERAL (SELECT sqlstreams.retry_delay(g, attempts) AS delay OFFSET 0) AS d
                     WHERE delay < '0' OR delay > g.backoff_cap OR delay IS NULL",
                )
                .await;
                assert_eq!(wrong, 0, "base {base}, factor {factor}, cap {cap}");
            }
        }
    }
}

/// The bound grows by the factor until the cap, and the delays fill it: full jitter.
#[tokio::test]
async fn delays_grow_by_the_factor_and_are_spread() {
    let plain = installed(&database().await).await;
    for (attempts, bound) in
        [(1, 1.0), (2, 2.0), (3, 4.0), (8, 128.0), (9, 256.0), (10, 300.0), (2147483647, 300.0)]
    {
        let row = plain
            .db
            .query_one(
                "SELECT min(s)::float8, avg(s)::float8, max(s)::float8
                 FROM (SELECT extract(epoch FROM sqlstreams.retry_delay(g, $1)) AS s FROM sqlstreams.consumer_group AS g, generate_series(1, 2000)) AS x",
                &[&attempts],
            )
            .await
            .unwrap();
        let (least, mean, most): (f64, f64, f64) = (row.get(0), row.get(1), row.get(2));
        assert!(most <= bound && most > bound * 0.95, "attempts {attempts}: {most} of {bound}");
        assert!(least < bound * 0.05, "attempts {attempts}: {least} of {bound}");
        assert!((mean / bound - 0.5).abs() < 0.05, "attempts {attempts}: {mean} of {bound}");
    }
}

/// The last attempt there is room for, settled through the protocol.
#[tokio::test]
async fn attempts_up_to_the_largest_number_are_counted() {
    let plain = installed(&database().await).await;
    plain
        .db
        .batch_execute(
            "UPDATE sqlstreams.consumer_group SET max_attempts = 2147483647, backoff_factor = 1000",
        )
        .await
        .unwrap();
    let id = plain.produce(1).await[0];
    let lease = plain.claim(1).await.unwrap();
    assert!(plain.fail(&lease, &[(id, "retry", None)]).await);
    for (attempts, after) in
        [(2147483645, "ready a2147483646 d0 l0 r0"), (2147483646, "dead a2147483647 d0 l0 r0")]
    {
        plain
            .db
            .execute(
                &format!(
                    "UPDATE {} SET attempts = $1, due_at = clock_timestamp()",
                    plain.exceptions()
                ),
                &[&attempts],
            )
            .await
            .unwrap();
        let (token, ids) = plain.claim_exceptions(1, false).await;
        assert_eq!(ids, [id]);
        assert!(plain.settle_exceptions(token, &[(id, "retry", None)]).await.is_empty());
        assert_eq!(plain.exception(id).await, after);
    }
    let due = "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE due_at > clock_timestamp() + interval '5 minutes'";
    assert_eq!(count(&plain.db, due).await, 0);
}

/// Delays that a handler asks for: no number of seconds breaks date arithmetic.
#[tokio::test]
async fn tb_085_impossible_delays_are_brought_within_reach() {
    let plain = installed(&database().await).await;
    let delays = [
        1e12,
        1e300,
        f64::MAX,
        -1.0,
        -1e300,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        0.0,
        1e-12,
    ];
    let ids = plain.produce(delays.len() as i64 * 2).await;
    let lease = plain.claim(100).await.unwrap();
    let failed: Vec<_> = ids
        .iter()
        .enumerate()
        .map(|(n, id)| (*id, if n % 2 == 0 { "retry" } else { "delay" }, Some(delays[n / 2])))
        .collect();
    assert!(plain.fail(&lease, &failed).await);
    let sql = "SELECT count(*) FROM sqlstreams.exception_queue_1 WHERE state = 'ready' AND isfinite(due_at) AND due_at BETWEEN first_failed_at - interval '1 second' AND clock_timestamp() + interval '3651 days'";
    assert_eq!(count(&plain.db, sql).await, ids.len() as i64);
    plain.all_due().await;
    let (token, claimed) = plain.claim_exceptions(100, false).await;
    let again: Vec<_> = claimed.iter().map(|id| (*id, "delay", Some(f64::INFINITY))).collect();
    assert!(plain.settle_exceptions(token, &again).await.is_empty());
    assert_eq!(count(&plain.db, sql).await, ids.len() as i64);
}
