//! Costs that must not grow: without a vacuum, with plans that are kept, and with very many exceptions. Counted in buffers.

use tokio_postgres::Client as Db;

use crate::buffers::{average, buffers};
use crate::plain::{Plain, create_group, installed};
use crate::support::{client_at, count, database};

/// The value that all but one of a hundred samples keep below, and their usual one.
fn spread(mut samples: Vec<i64>) -> (i64, f64) {
    let mean = average(samples.clone());
    // Those that read the whole catalogue as well are not the call's: see `average`.
    samples.retain(|sample| (*sample as f64) < mean + 1_000.0);
    samples.sort_unstable();
    (samples[(samples.len() * 99 / 100).min(samples.len() - 1)], mean)
}

/// The autovacuum workers are all busy with other tables, for as long as anybody cares: none ever comes to these. Nobody holds a snapshot, so what is
/// dead can be passed over as soon as somebody has met it.
#[tokio::test(flavor = "multi_thread")]
async fn tb_013_claims_cost_the_same_when_no_vacuum_ever_comes() {
    const ROUNDS: i64 = 6_000;
    let url = database().await;
    let plain = installed(&url).await;
    plain.produce(2 * ROUNDS + 3_000).await;
    plain.db.batch_execute("VACUUM ANALYZE").await.unwrap();
    let tables = "SELECT relname::text FROM pg_class WHERE relnamespace = 'sqlstreams'::regnamespace AND relkind = 'r'";
    for table in plain.db.query(tables, &[]).await.unwrap() {
        let table: &str = table.get(0);
        let sql = format!("ALTER TABLE sqlstreams.{table} SET (autovacuum_enabled = false)");
        plain.db.batch_execute(&sql).await.unwrap();
    }
    let group = plain.group;
    // One message done and one that fails, is tried again and done then; so each table of the group is written.
    let work = format!(
        "CREATE FUNCTION work() RETURNS void LANGUAGE plpgsql AS $$
         DECLARE
             t   uuid := gen_random_uuid();
             bad bigint;
             ids bigint[];
         BEGIN
             SELECT lower(pending) INTO bad FROM sqlstreams.advance(1, {group}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 2, t);
             PERFORM sqlstreams.fail(1, {group}, 0, t, ARRAY[bad], '{{retry}}', '{{x}}', '{{0}}');
             PERFORM sqlstreams.settle(1, {group}, 0, t, '{{(,)}}');
             SELECT array_agg(id) INTO ids FROM sqlstreams.take_exceptions(1, {group}, t, 5, false, clock_timestamp() - interval '10 seconds');
             PERFORM sqlstreams.settle_exceptions(1, {group}, array_fill(t, ARRAY[cardinality(ids)]), ids,
                 array_fill('ok'::text, ARRAY[cardinality(ids)]), array_fill(NULL::text, ARRAY[cardinality(ids)]));
         END $$"
    );
    plain.db.batch_execute(&work).await.unwrap();
    let measure = async || {
        let mut samples = Vec::new();
        for _ in 0..250 {
            let claim = format!(
                "SELECT * FROM sqlstreams.advance(1, {group}, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', 1)"
            );
            samples.push(buffers(&plain.db, &claim).await);
            let settle = format!(
                "SELECT sqlstreams.settle(1, {group}, seq, token, '{{(,)}}') FROM (SELECT seq, token FROM {} OFFSET 0) AS l",
                plain.leases()
            );
            plain.db.batch_execute(&settle).await.unwrap();
        }
        spread(samples)
    };
    let before = measure().await;
    let sql =
        format!("DO $$ BEGIN FOR i IN 1..{ROUNDS} LOOP PERFORM work(); COMMIT; END LOOP; END $$");
    plain.db.batch_execute(&sql).await.unwrap();
    let after = measure().await;
    println!(
        "buffers of a claim, 99 of 100 and usually: {before:?}, and {after:?} after {ROUNDS} rounds without a vacuum"
    );
    let vacuums = "SELECT coalesce(sum(autovacuum_count), 0)::bigint FROM pg_stat_user_tables WHERE relname ~ '^(consumer|exception)_.*_1$'";
    assert_eq!(count(&plain.db, vacuums).await, 0);
    assert!(after.0 <= before.0 * 2, "{before:?} became {after:?}");
    assert!(after.1 <= before.1 * 1.5, "{before:?} became {after:?}");
}

/// A session that prepares its calls once, as drivers do: first for a group with very many exceptions, then for one with few.
struct Prepared<'a> {
    db: &'a Db,
}

impl Prepared<'_> {
    /// Claims an id and fetches its message, then takes the next exception; the buffers of each of the three calls.
    async fn round(&self, plain: &Plain, group: i64) -> [i64; 3] {
        let (token, other) = (uuid::Uuid::new_v4(), uuid::Uuid::new_v4());
        let calls = [
            format!("EXECUTE claim({group}, '{token}')"),
            format!("EXECUTE get({group}, '{token}')"),
            format!("EXECUTE take({group}, '{other}')"),
        ];
        let mut read = [0; 3];
        for (call, read) in calls.iter().zip(&mut read) {
            *read = buffers(self.db, call).await;
        }
        let done = format!(
            "SELECT sqlstreams.settle(1, {group}, 0, '{token}', '{{(,)}}');
             UPDATE due SET at = e.due_at FROM {0} AS e WHERE e.lease_id = '{other}' AND id = {group};
             SELECT sqlstreams.settle_exceptions(1, {group}, '{{{other}}}', ARRAY(SELECT message_id FROM {0} WHERE lease_id = '{other}'), '{{ok}}', '{{x}}')",
            plain.exceptions()
        );
        self.db.batch_execute(&done).await.unwrap();
        read
    }

    async fn rounds(&self, plain: &Plain, group: i64, times: usize) -> [f64; 3] {
        let mut samples = [const { Vec::new() }; 3];
        for _ in 0..times {
            let round = self.round(plain, group).await;
            for (samples, read) in samples.iter_mut().zip(round) {
                samples.push(read);
            }
        }
        samples.map(average)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_119_plans_that_are_kept_are_as_good_for_a_rare_group_as_for_a_skewed_one() {
    let url = database().await;
    let plain = installed(&url).await;
    let rare = create_group(&plain.db, 1, "rare").await;
    plain.produce(60_000).await;
    let fill = format!(
        "INSERT INTO {0} (group_id, message_id, state, attempts, due_at) SELECT {1}, n, 'ready', 1, clock_timestamp() - interval '1 hour' + n * interval '1 millisecond' FROM generate_series(20001, 60000) AS n;
         INSERT INTO {0} (group_id, message_id, state, attempts, due_at) SELECT {rare}, n, 'ready', 1, clock_timestamp() - interval '1 hour' + n * interval '1 millisecond' FROM generate_series(58801, 60000) AS n;
         CREATE TABLE due (id bigint PRIMARY KEY, at timestamptz NOT NULL);
         INSERT INTO due VALUES ({1}, '-infinity'), ({rare}, '-infinity');
         VACUUM ANALYZE",
        plain.exceptions(),
        plain.group
    );
    for sql in fill.split(";\n") {
        plain.db.batch_execute(sql).await.unwrap();
    }
    let prepare = "PREPARE claim(bigint, uuid) AS SELECT * FROM sqlstreams.advance(1, $1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 1, $2);
         PREPARE get(bigint, uuid) AS SELECT * FROM sqlstreams.fetch(1, $1, $2, 0, 1000, 1000000000, NULL::json);
         PREPARE take(bigint, uuid) AS SELECT * FROM sqlstreams.take_exceptions(1, $1, $2, 1, false, (SELECT at FROM due WHERE id = $1))";
    // What the rare group costs a session that has seen nothing else.
    let fresh = plain.again(&url).await;
    fresh.db.batch_execute(prepare).await.unwrap();
    let expected = Prepared { db: &fresh.db }.rounds(&plain, rare, 30).await;

    plain.db.batch_execute(prepare).await.unwrap();
    let session = Prepared { db: &plain.db };
    let skewed = [
        session.rounds(&plain, plain.group, 30).await,
        session.rounds(&plain, plain.group, 940).await,
        session.rounds(&plain, plain.group, 30).await,
    ];
    let then = [
        session.rounds(&plain, rare, 30).await,
        session.rounds(&plain, rare, 940).await,
        session.rounds(&plain, rare, 30).await,
    ];
    println!("claim, fetch, take: skewed {skewed:?}, then rare {then:?}; rare alone {expected:?}");
    for call in 0..3 {
        for part in &skewed[1..] {
            assert!(part[call] <= skewed[0][call] * 1.5 + 10.0, "{call}: {skewed:?}");
        }
        for part in &then {
            assert!(part[call] <= expected[call] * 1.5 + 10.0, "{call}: {then:?}, {expected:?}");
        }
    }
}

/// Lists and states read as much of half a million exceptions as of a fifth of that, and of a long log nothing. What is not counted is an estimate, and said to be.
#[tokio::test(flavor = "multi_thread")]
async fn tb_122_counts_of_states_read_no_more_than_a_bounded_part() {
    const MANY: i64 = 500_000;
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").partition_size(50_000).create().await.unwrap();
    let (dead, mixed) = ("dead", "mixed");
    stream.group(dead).create().await.unwrap();
    stream.group(mixed).create().await.unwrap();
    db.batch_execute("ALTER TABLE sqlstreams.exception_queue_1 SET (autovacuum_enabled = false)")
        .await
        .unwrap();
    let insert = async |from: i64, upto: i64| {
        let fill = [
            format!(
                "INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, attempts, due_at, dead_at)
                 SELECT 1, n, 'dead', 1, now(), now() FROM generate_series({from}, {upto}) AS n"
            ),
            // Of the other a few of each state, behind as many dead ones.
            format!(
                "INSERT INTO sqlstreams.exception_queue_1 (group_id, message_id, state, attempts, due_at, dead_at, lease_expires_at, lease_id, losses, lane)
                 SELECT 2, n, (ARRAY['dead', 'ready', 'ready', 'inflight', 'deferred'])[m + 1], 1, now(), CASE m WHEN 0 THEN now() END,
                        CASE m WHEN 3 THEN now() + interval '1 hour' END, CASE m WHEN 3 THEN gen_random_uuid() END, (m = 2)::int, CASE m WHEN 4 THEN 1 END
                 FROM (SELECT n, CASE WHEN n % 1000 < 5 AND n <= 99000 THEN n % 1000 ELSE 0 END AS m FROM generate_series({from}, {upto}) AS n) AS x"
            ),
            "VACUUM ANALYZE sqlstreams.exception_queue_1".to_owned(),
        ];
        for sql in fill {
            db.batch_execute(&sql).await.unwrap();
        }
    };
    let looks = [
        "list_cursors('s', 'dead')",
        "list_cursors()",
        "list_exceptions('s', 'dead', 'dead', 0, 100)",
        "list_exceptions('s', 'mixed', 'dead', 90000, 100)",
        "retention_hold(1)",
        "list_retention_holds()",
        "poll(1, 1)",
    ];
    let read = async || {
        let mut all = Vec::new();
        for look in looks {
            let mut samples = Vec::new();
            for _ in 0..5 {
                samples.push(buffers(&db, &format!("SELECT * FROM sqlstreams.{look}")).await);
            }
            all.push(average(samples));
        }
        all
    };

    // As many as are counted.
    insert(1, 99_000).await;
    let status = async |name: &str| {
        let status = stream.group(name).open().await.unwrap().status().await.unwrap();
        (status.ready, status.inflight, status.deferred, status.dead, status.estimated)
    };
    assert_eq!(status(dead).await, (0, 0, 0, 99_000, false));
    assert_eq!(status(mixed).await, (2 * 99, 99, 99, 99_000 - 4 * 99, false));
    insert(99_001, 150_000).await;
    let before = read().await;
    insert(150_001, MANY).await;
    let after = read().await;
    println!("buffers of {looks:?}: {before:?}, and {after:?} with {MANY} exceptions each");
    for ((look, before), after) in looks.iter().zip(&before).zip(&after) {
        assert!(after <= &(before * 1.3 + 50.0), "{look}: {before} became {after}");
    }
    // Few enough to be counted in a moment: index entries, not rows.
    assert!(after[0] < 5_000.0, "{after:?}");
    let (.., about, estimated) = status(dead).await;
    assert!(estimated && (about - MANY).abs() < MANY / 5, "{about}");
    assert_eq!(
        stream.group(dead).open().await.unwrap().count_dead_letters().await.unwrap(),
        MANY.unsigned_abs()
    );
    let (ready, inflight, deferred, _, _) = status(mixed).await;
    assert_eq!(
        (ready, inflight, deferred),
        (2 * 99, 99, 99),
        "behind the dead ones they are counted"
    );
    // Before anything is analyzed the planner knows less; it is no failure.
    db.batch_execute(
        "DELETE FROM pg_statistic WHERE starelid = 'sqlstreams.exception_queue_1'::regclass",
    )
    .await
    .unwrap();
    assert!(status(dead).await.3 > 100_000);

    // The log does not count at all.
    let fill = "SELECT sqlstreams.ensure_partitions(1, 30);
         INSERT INTO sqlstreams.message_log_1 (payload) SELECT to_json(n) FROM generate_series(1, 400000) AS n";
    db.batch_execute(fill).await.unwrap();
    let long = read().await;
    for ((look, before), after) in looks.iter().zip(&after).zip(&long) {
        assert!(after <= &(before * 1.3 + 50.0), "{look}: {before} became {after}");
    }
}
