//! Retention that drops unread messages, where a stream says so; dead letters that are too old; what a role needs; growth.

use std::time::Duration;

use sqlstreams::{Client, Delivery, Outcome, Retention};

use crate::retention::{DAY, Scene, hour, numbers, scene};
use crate::support::{connect, count, eventually};

/// Groups of each mode that have read nothing, or some: they go on behind the gap at once.
#[tokio::test]
async fn groups_that_are_behind_go_on_behind_the_gap() {
    let scene = scene(hour().drop_unread(true)).await;
    scene.fill(4_500).await;
    for group in ["parallel", "ordered", "fair"] {
        let builder = scene.stream.group(group);
        match group {
            "ordered" => builder.ordered().create().await,
            "fair" => builder.fair().create().await,
            _ => builder.create().await,
        }
        .unwrap();
    }
    scene.stream.group("half").create().await.unwrap();
    let settle = "SELECT a.seq, a.token, sqlstreams.settle(1, g.id, a.seq, a.token, '{(,)}') FROM sqlstreams.consumer_group AS g,
        LATERAL sqlstreams.advance(1, g.id, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 2500) AS a WHERE g.name = 'half'";
    scene.db.query(settle, &[]).await.unwrap();
    scene.a_day_later().await;
    scene.let_go(4).await;
    for (group, dropped) in
        [("parallel", 3_999), ("ordered", 3_999), ("fair", 3_999), ("half", 1_499)]
    {
        let status = scene.stream.group(group).open().await.unwrap().status().await.unwrap();
        assert_eq!((status.claimed, status.dropped), (3_999, dropped), "{group}");
        assert_eq!(scene.consume(group).await, numbers(4_000..=4_500), "{group}");
    }
    let audited = "SELECT sum((detail ->> 'to')::bigint - (detail ->> 'from')::bigint + 1)::bigint FROM sqlstreams.audit WHERE action = 'drop_unread'";
    assert_eq!(count(&scene.db, audited).await, 3 * 3_999 + 1_499);
}

/// What a consumer has in hand when it is dropped may still fail, and is tried again then.
#[tokio::test]
async fn what_is_in_hand_is_not_lost() {
    let scene = scene(hour().drop_unread(true)).await;
    scene.fill(1_500).await;
    let sql = "SELECT sqlstreams.create_group(1, 'g'); SELECT sqlstreams.advance(1, 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', 1200, '11111111-1111-1111-1111-111111111111')";
    scene.db.batch_execute(sql).await.unwrap();
    scene.a_day_later().await;
    scene.let_go(1).await;
    let fail = "SELECT sqlstreams.fail(1, 1, 1, '11111111-1111-1111-1111-111111111111', '{5,500}', '{retry,dead}', '{a,b}', '{0,0}');
        SELECT sqlstreams.settle(1, 1, 1, '11111111-1111-1111-1111-111111111111', '{[1,1201)}')";
    scene.db.batch_execute(fail).await.unwrap();
    scene.stream.group("g").open().await.unwrap().redrive(None, 10).await.unwrap();
    let mut expected = vec![5, 500];
    expected.extend(1_201..=1_500);
    assert_eq!(scene.consume("g").await, expected);
    scene.stream.retain().await.unwrap();
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.message_archive_1").await, 0);
}

/// A group whose cursor somebody keeps locked does not keep the rest from going.
#[tokio::test]
async fn a_locked_cursor_is_left_as_it_is() {
    let scene = scene(hour().drop_unread(true)).await;
    scene.fill(1_500).await;
    scene.stream.group("locked").create().await.unwrap();
    scene.stream.group("free").create().await.unwrap();
    scene.a_day_later().await;
    let other = connect(&scene.url).await;
    other
        .batch_execute(
            "BEGIN; SELECT FROM sqlstreams.consumer_group_cursor_1 WHERE group_id = 1 FOR UPDATE",
        )
        .await
        .unwrap();
    // The rows of its group are read all the same.
    scene.let_go(1).await;
    other.batch_execute("COMMIT").await.unwrap();
    assert_eq!(scene.consume("free").await, numbers(1_000..=1_500));
    assert_eq!(scene.consume("locked").await, numbers(1_000..=1_500));
}

/// Unread messages that no limit wants gone stay: dropping is for the limits, not for what is resolved.
#[tokio::test]
async fn only_what_lies_beyond_a_limit_is_dropped() {
    let keep = Retention::forever().keep_count(1_500).until_resolved().drop_unread(true);
    let scene = scene(keep).await;
    scene.fill(4_500).await;
    scene.stream.group("slow").create().await.unwrap();
    scene.a_day_later().await;
    scene.let_go(3).await;
    assert_eq!(scene.consume("slow").await, numbers(3_000..=4_500));
    scene.let_go(1).await;
}

/// While consumers run: they miss what is dropped, get all else once, and end with nothing left.
#[tokio::test(flavor = "multi_thread")]
async fn consumers_run_on_over_the_gap() {
    for mode in ["parallel", "ordered", "fair"] {
        let scene = scene(hour().drop_unread(true)).await;
        scene.fill(6_500).await;
        let builder = scene.stream.group("g");
        let group = match mode {
            "ordered" => builder.ordered().create().await,
            "fair" => builder.fair().create().await,
            _ => builder.create().await,
        }
        .unwrap();
        scene.a_day_later().await;
        let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let consumer = group.consumer().concurrency(2).until_caught_up();
        let running = tokio::spawn(consumer.run({
            let seen = seen.clone();
            move |message: Delivery<u64>| {
                seen.lock().unwrap().push(message.payload);
                async {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    Ok::<_, std::io::Error>(())
                }
            }
        }));
        eventually(async || seen.lock().unwrap().len() > 20).await;
        eventually(async || {
            scene.stream.retain().await.unwrap();
            scene.partitions().await[0] == 6
        })
        .await;
        running.await.unwrap().unwrap();
        let mut seen = seen.lock().unwrap().clone();
        let all = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all, "{mode}: once");
        assert!(seen.ends_with(&numbers(6_000..=6_500)), "{mode}");
        let status = group.status().await.unwrap();
        assert_eq!((status.lag, status.dead, status.ready), (0, 0, 0), "{mode}");
        println!("{mode}: {all} handled, {} ids dropped", status.dropped);
        assert!(
            all as i64 + status.dropped >= 6_500,
            "{mode}: none is missing without being counted"
        );
    }
}

#[tokio::test]
async fn dead_letters_go_when_they_are_too_old() {
    let scene = scene(hour().keep_dead_for(DAY * 30)).await;
    scene.fill(1_500).await;
    let group = scene.stream.group("g").create().await.unwrap();
    let fail = async |message: Delivery<u64>| match message.payload {
        1..=40 => Ok::<_, std::io::Error>(Outcome::Dead("no".into())),
        _ => Ok(Outcome::Done),
    };
    group.consumer().until_caught_up().run(fail).await.unwrap();
    scene.a_day_later().await;
    assert_eq!(scene.stream.retain().await.unwrap().dead_letters, 0);
    let age = "UPDATE sqlstreams.exception_queue_1 SET dead_at = dead_at - interval '31 days' WHERE message_id <= 30";
    scene.db.batch_execute(age).await.unwrap();
    // One that an operator has in hand stays for now.
    let operator = connect(&scene.url).await;
    operator.batch_execute("BEGIN; SELECT sqlstreams.redrive(1, 1, '{7}')").await.unwrap();
    assert_eq!(scene.stream.retain().await.unwrap().dead_letters, 29);
    operator.batch_execute("COMMIT").await.unwrap();
    assert_eq!(scene.stream.retain().await.unwrap().dead_letters, 0);
    assert_eq!(group.status().await.unwrap().dead, 10);
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.message_archive_1").await, 11);
    assert_eq!(scene.consume("g").await, [7]);
}

/// Takes the statements between these lines out of a page.
fn grants(page: &str) -> String {
    let (_, rest) = page.split_once("```sql\n-- as the owner").expect("grants");
    let (block, _) = rest.split_once("```").unwrap();
    block.split_once('\n').unwrap().1.to_owned()
}

/// A role that only consumes needs one table more to get what failed when its partition has left.
#[tokio::test]
async fn what_the_page_grants_is_enough_and_needed() {
    let granted = grants(include_str!("../../../../docs/retention.md"));
    let scene = scene(hour()).await;
    scene.fill(1_500).await;
    let group = scene.stream.group("g").create().await.unwrap();
    let fail = async |message: Delivery<u64>| match message.payload {
        5 => Ok::<_, std::io::Error>(Outcome::Dead("no".into())),
        _ => Ok(Outcome::Done),
    };
    group.consumer().until_caught_up().run(fail).await.unwrap();
    let password = scene.url.split(['@', ':']).nth(2).unwrap();
    let role = format!(
        "CREATE ROLE eater LOGIN PASSWORD '{password}'; GRANT USAGE ON SCHEMA sqlstreams TO eater;
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA sqlstreams TO eater; GRANT ALL ON ALL SEQUENCES IN SCHEMA sqlstreams TO eater;
         REVOKE ALL ON sqlstreams.message_archive_1 FROM eater"
    );
    scene.db.batch_execute(&role).await.unwrap();
    scene.a_day_later().await;
    scene.let_go(1).await;
    let eater = Client::builder(&scene.url.replace("//postgres:", "//eater:"))
        .migrate(false)
        .maintenance(false);
    let stream = eater.connect().await.unwrap().stream::<u64>("s").open().await.unwrap();
    let error = stream.read(&[5]).await.unwrap_err();
    assert_eq!(error.kind(), sqlstreams::ErrorKind::PermissionDenied, "{error:?}");
    scene.db.batch_execute(&granted.replace("TO app", "TO eater")).await.unwrap();
    assert_eq!(stream.read(&[5]).await.unwrap()[0].payload, 5);
    stream.group("g").open().await.unwrap().redrive(None, 1).await.unwrap();
    let mut got = 0;
    let consumer = stream.group("g").open().await.unwrap();
    let handled = consumer.consumer().until_caught_up().run(async |message: Delivery<u64>| {
        assert_eq!(message.payload, 5);
        Ok::<_, std::io::Error>(())
    });
    got += handled.await.unwrap().handled;
    assert_eq!(got, 1);
}

/// Everything is consumed, nobody does anything: the log stays as large as it may be, by the maintenance alone.
#[tokio::test(flavor = "multi_thread")]
async fn tb_019_what_is_consumed_goes_by_itself() {
    let scene: Scene = scene(Retention::forever().until_resolved()).await;
    // Some of them fail for good, one in a thousand.
    let group = scene.stream.group("g").create().await.unwrap();
    for round in 0..12 {
        scene.fill(2_500).await;
        let fail = async |message: Delivery<u64>| match message.payload % 1_000 {
            1 => Ok::<_, std::io::Error>(Outcome::Dead("no".into())),
            _ => Ok(Outcome::Done),
        };
        group.consumer().until_caught_up().run(fail).await.unwrap();
        // As after some minutes.
        scene.a_day_later().await;
        eventually(async || {
            scene.client.maintenance().once().await.unwrap();
            let head = count(&scene.db, "SELECT max(id) FROM sqlstreams.message_log_1").await;
            scene.partitions().await[0] >= head / 1_000 && scene.strays().await == 0
        })
        .await;
        let kept = count(&scene.db, "SELECT count(*) FROM sqlstreams.message_log_1").await;
        assert!(kept < 1_000, "{kept} messages after round {round}");
    }
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.message_archive_1").await, 30);
    assert_eq!(group.dead_letters(0, 100).await.unwrap().len(), 30);
    let failures = scene.client.maintenance().status().await.unwrap().failures;
    let ours = failures.iter().filter(|f| ["retention", "archive"].contains(&&*f.step));
    assert_eq!(ours.count(), 0, "{failures:?}");
}
