//! What the SQL functions refuse: with a code, and a hint that says what would do.

use crate::support::client;

#[tokio::test(flavor = "multi_thread")]
async fn arguments_that_cannot_be_are_refused_with_a_code_and_a_hint() {
    let (client, db) = client().await;
    client.stream::<u64>("s").create().await.unwrap().group("g").create().await.unwrap();
    client.stream::<u64>("c").compacted(true).create().await.unwrap();
    let long_key = "k".repeat(1_025);
    let calls = [
        "produce('s', NULL)",
        &format!("produce('s', '1', p_key => '{long_key}')"),
        &format!("produce('s', '1', p_routing_key => '{long_key}')"),
        "produce('s', '1', p_headers => '[1]')",
        "produce('s', '1', p_headers => 'null')",
        "produce('s', '1', p_delay => '-1 s')",
        "produce('s', '1', p_delay => '200001 years')",
        "produce('s', '1', p_expires_in => '-1 s')",
        "produce('s', '1', p_deliver_at => 'infinity')",
        "produce('s', '1', p_deliver_at => now(), p_delay => '1 s')",
        "produce('s', '1', p_expires_at => now(), p_expires_in => '1 s')",
        "produce('c', '1')",
        "produce_1('{a,b}', '{}', '{}', '{1}', '{}', '{}', '{}', '{}', '{}')",
        "alter_group(1, 1, p_lease_duration => '-1 s')",
        "alter_group(1, 1, p_max_attempts => 0)",
        "alter_group(1, 1, p_backoff_base => '-1 s')",
        "alter_group(1, 1, p_backoff_cap => '366 days')",
        "alter_group(1, 1, p_backoff_factor => 'NaN')",
        "alter_group(1, 1, p_max_in_flight => -1)",
        "alter_group(1, 1, p_rate_limit => 'NaN')",
        "alter_group(1, 1, p_rate_limit => -1)",
        "redrive(1, 1, NULL, -1)",
        "discard(1, 1, NULL, 0)",
        "expire_idempotency_keys(1, p_limit => -1)",
        "compact(2, p_limit => 0)",
        "compact(2, p_min_age => '-1 s')",
        "compact(2, p_tombstone_age => '9999999 years')",
        "current_messages('c', p_limit => 0)",
        "current_messages('c', p_limit => NULL)",
        "count_passed_over(1, 1, -5)",
        "seek(1, 1)",
        "seek(1, 1, 'end')",
        "seek(1, 1, p_id => 99)",
        "seek(1, 1, 'latest', p_dead => 'drop')",
        "replay(1, 1, 2, 1)",
        "replay(1, 1, 1, p_from => now())",
    ];
    for call in calls {
        let sql = format!("SELECT * FROM sqlstreams.{call}");
        let error = db.query(&sql, &[]).await.expect_err(call);
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), "SQ004", "{call}: {error:?}");
        assert!(error.hint().is_some_and(|hint| hint.ends_with('.')), "{call}: {error:?}");
        assert!(error.message().len() < 300, "{call}: {error:?}");
    }
}

/// Times that are none do no harm to the others.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_due_at_infinity_cannot_be_stored() {
    let (client, db) = client().await;
    client.stream::<u64>("s").create().await.unwrap();
    let direct = "INSERT INTO sqlstreams.message_delayed_1 (deliver_at, sent_at, payload) VALUES ('infinity', now(), '1')";
    assert!(db.batch_execute(direct).await.is_err());
    let batch = "SELECT sqlstreams.produce_1('{}', '{}', '{}', '{1}', '{}', '{infinity}', '{}', '{}', '{}')";
    assert!(db.batch_execute(batch).await.is_err());
    for expires in ["infinity", "-infinity", "294276-12-31 23:59:59"] {
        let sql = format!("SELECT sqlstreams.produce('s', '1', p_expires_at => '{expires}')");
        db.batch_execute(&sql).await.unwrap();
    }
    let consumer =
        client.stream::<u64>("s").open().await.unwrap().group("g").consumer().until_caught_up();
    let handled = consumer.run(async |_: sqlstreams::Delivery<u64>| {}).await.unwrap().handled;
    assert_eq!(handled, 2);
}
