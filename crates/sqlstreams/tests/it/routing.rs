//! What bindings match: the SQL condition against the reference, limits, and everything that is no binding.

use std::collections::BTreeSet;

use fastrand::Rng;
use serde_json::{Value, json};
use sqlstreams::{Binding, Client, ErrorKind, Headers, Outgoing, Stream};
use tokio_postgres::error::SqlState;

use crate::plain::{Plain, installed};
use crate::reference::{Sample, case, is_for, matches, pattern};
use crate::support::{client, database, numbers};

/// Sends messages in one transaction; returns their ids.
pub async fn send(plain: &Plain, samples: &[Sample]) -> Vec<i64> {
    let keys: Vec<Option<&str>> = samples.iter().map(|s| s.routing_key.as_deref()).collect();
    let headers: Vec<Option<String>> =
        samples.iter().map(|s| s.headers.as_ref().map(Value::to_string)).collect();
    let sql = format!(
        "INSERT INTO {} (routing_key, headers, payload) SELECT k, h::jsonb, '1' FROM unnest($1::text[], $2::text[]) AS u(k, h) RETURNING id",
        plain.log()
    );
    let rows = plain.db.query(&sql, &[&keys, &headers]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Sends numbers, each tenth with routing key `rare.N`, the others with `often.N`.
pub async fn routed(
    client: &Client,
    name: &str,
    numbers: std::ops::Range<u64>,
    each: u64,
) -> Stream<u64> {
    let stream = client.stream::<u64>(name).create_if_missing().await.unwrap();
    let numbers: Vec<u64> = numbers.collect();
    for batch in numbers.chunks(10_000) {
        let messages = batch.iter().map(|n| {
            let word = if n.is_multiple_of(each) { "rare" } else { "often" };
            Outgoing::new(n).routing_key(format!("{word}.{}", n % 3))
        });
        stream.producer().send_all(messages).await.unwrap();
    }
    stream
}

/// A new group with these bindings that starts at the end of the log.
async fn bound_group(plain: &Plain, url: &str, name: &str, bindings: &[Value]) -> Plain {
    let bindings = Value::from(bindings.to_vec()).to_string();
    let sql = "SELECT sqlstreams.create_group($1, $2, sqlstreams.stream_head($1), p_bindings => $3::text::jsonb)";
    let group = plain.db.query_one(sql, &[&plain.stream, &name, &bindings]).await.unwrap().get(0);
    Plain { group, ..plain.again(url).await }
}

/// All messages of the group, page by page: from leases of many ids (`width`), or from leases of just those.
async fn take_all(plain: &Plain, random: &mut Rng, width: Option<i64>) -> BTreeSet<i64> {
    let mut taken = BTreeSet::new();
    loop {
        let limit = random.i64(1..40);
        let row = plain.db
            .query_one(
                "SELECT token, seq, looked_at FROM sqlstreams.advance($1, $2, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', $3, p_width => $4)",
                &[&plain.stream, &plain.group, &limit, &width],
            )
            .await
            .unwrap();
        let Some(token) = row.get::<_, Option<uuid::Uuid>>(0) else {
            match row.get::<_, Option<i64>>(2) {
                None | Some(0) => return taken,
                Some(_) => continue,
            }
        };
        let mut after = 0_i64;
        loop {
            let page = random.i64(1..20);
            let rows = plain.db
                .query(
                    "SELECT id, more FROM sqlstreams.fetch($1, $2, $3, $4, $5, 1000000, NULL::json)",
                    &[&plain.stream, &plain.group, &token, &after, &page],
                )
                .await
                .unwrap();
            for row in &rows {
                after = row.get(0);
                assert!(taken.insert(after), "{after} twice");
            }
            if !rows.last().is_some_and(|row| row.get(1)) {
                break;
            }
        }
        let seq: i64 = row.get(1);
        let settled = "SELECT sqlstreams.settle($1, $2, $3, $4, '{(,)}')";
        plain.db.query_one(settled, &[&plain.stream, &plain.group, &seq, &token]).await.unwrap();
    }
}

/// TB-164: whatever users write into patterns, keys and headers, it is compared and never run.
#[tokio::test(flavor = "multi_thread")]
async fn tb_164_bindings_match_as_the_reference_does() {
    let seed =
        std::env::var("SQLSTREAMS_SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    println!("SQLSTREAMS_SEED={seed}");
    let mut random = Rng::with_seed(seed);
    let url = database().await;
    let plain = installed(&url).await;
    let (mut hits, mut misses) = (0, 0);
    for round in 0..60 {
        let (bindings, samples) = case(&mut random, 60);
        let coarse = bound_group(&plain, &url, &format!("coarse {round}"), &bindings).await;
        let exact = bound_group(&plain, &url, &format!("exact {round}"), &bindings).await;
        let ids = send(&plain, &samples).await;
        let expected: BTreeSet<i64> = std::iter::zip(&ids, &samples)
            .filter(|(_, sample)| is_for(&bindings, sample))
            .map(|(id, _)| *id)
            .collect();
        let width = random.i64(1..100);
        let found = take_all(&coarse, &mut random, Some(width)).await;
        assert_eq!(found, expected, "seed {seed}: {bindings:?}\n{samples:?}\n{ids:?}");
        let found = take_all(&exact, &mut random, None).await;
        assert_eq!(found, expected, "seed {seed}, exact: {bindings:?}\n{samples:?}\n{ids:?}");
        hits += expected.len();
        misses += samples.len() - expected.len();
        // The same, asked for by name and told binding by binding.
        let sample = &samples[0];
        let told: Vec<(String, String)> = reached(&coarse, sample).await;
        let by: Vec<&Value> = bindings.iter().filter(|b| matches(b, sample)).collect();
        let told = told.iter().filter(|(group, _)| *group == format!("coarse {round}")).count();
        // Bindings that are the same in normal form are one.
        assert!(
            (told == 0) == by.is_empty() && told <= by.len(),
            "seed {seed}: {bindings:?} {sample:?}"
        );
        for group in [&coarse, &exact] {
            let drop = "SELECT sqlstreams.drop_group($1, $2)";
            plain.db.execute(drop, &[&group.stream, &group.group]).await.unwrap();
        }
    }
    println!("{hits} hits, {misses} misses");
    assert!(hits > 300 && misses > 300, "the cases say little: {hits}, {misses}");
}

async fn reached(plain: &Plain, sample: &Sample) -> Vec<(String, String)> {
    let headers = sample.headers.as_ref().map(Value::to_string);
    let sql = "SELECT consumer_group, coalesce(pattern, headers::text, '') FROM sqlstreams.test_bindings($1, $2, $3::text::jsonb)";
    let rows = plain.db.query(sql, &[&plain.stream, &sample.routing_key, &headers]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// The normal form of a pattern means the same, and is its own normal form.
#[tokio::test(flavor = "multi_thread")]
async fn patterns_have_one_normal_form() {
    let plain = installed(&database().await).await;
    plain.db.batch_execute("SET search_path = sqlstreams").await.unwrap();
    let normal = async |pattern: &str| -> String {
        plain.db.query_one("SELECT normal_pattern($1)", &[&pattern]).await.unwrap().get(0)
    };
    for (pattern, expected) in [
        ("#.#", "#"),
        ("#.*", "*.#"),
        ("#.*.#", "*.#"),
        ("a.#.#.b", "a.#.b"),
        ("a.#.*.#.*.b", "a.*.*.#.b"),
        ("*.*", "*.*"),
        ("a.b", "a.b"),
        ("#.a", "#.a"),
    ] {
        assert_eq!(normal(pattern).await, expected, "{pattern}");
    }
    let mut random = Rng::new();
    for _ in 0..300 {
        let pattern = pattern(&mut random);
        let form = normal(&pattern).await;
        assert_eq!(normal(&form).await, form, "{pattern}");
        for _ in 0..20 {
            let (_, samples) = case(&mut random, 1);
            let both = [&pattern, &form].map(|p| matches(&json!(p), &samples[0]));
            assert_eq!(both[0], both[1], "{pattern} and {form}: {:?}", samples[0]);
        }
    }
}

/// Limits are told by a class of their own, what is wrong in words, and nothing is changed.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_binding_is_refused() {
    let plain = installed(&database().await).await;
    let long = "a".repeat(256);
    let words = vec!["a"; 33].join(".");
    let many: Value = (0..65).map(|n| Value::from(format!("a{n}"))).collect();
    for (bindings, said) in [
        (json!(["a..b"]), "empty word"),
        (json!([".a"]), "empty word"),
        (json!(["a."]), "empty word"),
        (json!([""]), "empty"),
        (json!(["a.b*"]), "wildcard within the word"),
        (json!(["##"]), "wildcard within the word"),
        (json!([long]), "256 bytes"),
        (json!(["é".repeat(128)]), "256 bytes"),
        (json!([words]), "33 words"),
        (many, "65 bindings"),
        (json!({}), "array"),
        (json!("a"), "array"),
        (Value::Null, "array"),
        (json!([1]), "no binding"),
        (json!([["a"]]), "no binding"),
        (json!([{}]), "says nothing"),
        (json!([{"headers": {}}]), "says nothing"),
        (json!([{"pattern": null}]), "says nothing"),
        (json!([{"pattern": 1}]), "no text"),
        (json!([{"headers": ["a"]}]), "no object"),
        (json!([{"headers": {"a": "x".repeat(2048)}}]), "more than 2048"),
        (json!([{"pattern": "a", "header": {}}]), "'header'"),
        (json!(["a", "'; DROP TABLE message_log_1; --*"]), "wildcard within"),
    ] {
        let text = bindings.to_string();
        let set = "SELECT sqlstreams.set_bindings($1, $2, $3::text::jsonb)";
        let error = plain.db.query(set, &[&plain.stream, &plain.group, &text]).await.unwrap_err();
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code(), &SqlState::from_code("SQ020"), "{text}: {error}");
        assert!(error.message().contains(said) && error.message().len() < 300, "{text}: {error}");
        assert!(error.hint().is_some(), "{text}");
    }
    let set = "SELECT sqlstreams.set_bindings($1, $2, NULL)";
    assert!(plain.db.query(set, &[&plain.stream, &plain.group]).await.is_err());
    let versions = "SELECT count(*) FROM sqlstreams.binding_set";
    assert_eq!(crate::support::count(&plain.db, versions).await, 0);
    // At the limits they are taken.
    let full: Vec<Value> = (0..64).map(|n| format!("{}.{n:02}", "é".repeat(126)).into()).collect();
    assert!(full.iter().all(|p| p.as_str().unwrap().len() == 255));
    let text = Value::from(full).to_string();
    let set = "SELECT sqlstreams.set_bindings($1, $2, $3::text::jsonb)";
    plain.db.query(set, &[&plain.stream, &plain.group, &text]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_crate_tells_bad_bindings_by_their_kind() {
    let (client, _db) = client().await;
    let stream = numbers(&client, "s", 1).await;
    for binding in
        [Binding::from("a..b"), "*a".into(), "a\0".into(), Binding::headers([("a", "\0")])]
    {
        let error = stream.group("g").bind(binding.clone()).create().await.unwrap_err();
        assert_eq!((error.kind(), error.code()), (ErrorKind::InvalidBinding, "invalid_binding"));
        assert!(error.hint().is_some(), "{binding}: {error}");
    }
    // Refused as a whole.
    let error = stream.group("g").open().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownGroup);
    let error = stream.test_bindings(Some(&"a".repeat(256)), &Headers::new()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = stream.test_bindings(Some("a\0"), &Headers::new()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

/// The largest sets with the worst patterns stay within what a claim may cost.
#[tokio::test(flavor = "multi_thread")]
async fn patterns_cannot_be_made_to_run_for_ever() {
    let url = database().await;
    let plain = installed(&url).await;
    let worst: Vec<Value> = (0..64)
        .map(|n| format!("#.a{n}.{}", ["#.a", "#.*.b"].repeat(6).join(".")).into())
        .collect();
    let group = bound_group(&plain, &url, "worst", &worst).await;
    let key = ["a1", "a2"].repeat(42).join(".");
    let samples = vec![Sample { routing_key: Some(key), headers: None }; 1000];
    send(&plain, &samples).await;
    let begun = std::time::Instant::now();
    assert!(take_all(&group, &mut Rng::new(), Some(1000)).await.is_empty());
    println!("{:?} for 1,000 of the worst", begun.elapsed());
    assert!(begun.elapsed() < std::time::Duration::from_secs(5), "{:?}", begun.elapsed());
}
