//! Servers that restart and connections that break under running handlers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sqlstreams::{Client, Mode};
use sqlstreams_dev::{Cluster, StopMode};

use crate::journal::{Script, What};
use crate::proxy::{Cut, Place, Proxy, Statement};
use crate::scene::Scene;
use crate::support::{count, until};

/// A cluster of the test's own, which it may restart.
async fn cluster() -> Arc<Cluster> {
    let start = || Arc::new(Cluster::builder().durable(true).start().unwrap());
    tokio::task::spawn_blocking(start).await.unwrap()
}

async fn restart(cluster: &Arc<Cluster>, crash: bool) {
    let cluster = cluster.clone();
    let restart = move || {
        match crash {
            true => cluster.kill().unwrap(),
            false => cluster.stop(StopMode::Fast).unwrap(),
        }
        cluster.start_again().unwrap();
    };
    tokio::task::spawn_blocking(restart).await.unwrap();
}

fn has_word(statement: Statement<'_>, word: &str) -> bool {
    statement.sql.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == word)
}

/// Something of a consumer's connections hangs; its handlers are cancelled before anybody else starts their messages.
async fn is_cancelled_in_time(
    name: &'static str,
    mode: Mode,
    script: Script,
    hangs: fn(Statement<'_>) -> bool,
) {
    let scene = Scene::new(name, 8, Duration::from_secs(2)).await;
    scene.group.set_mode(mode).await.unwrap();
    let proxy = Proxy::start(&scene.place.url).await;
    let client = Client::connect(&proxy.url).await.unwrap();
    let first = scene.local_through(client, 1, 8, script).await;
    until("it has them in hand", Duration::from_secs(30), async || {
        scene.journal.of(What::Started).len() == 8
    })
    .await;
    let second = scene.local(2, 8, Script::Work(0)).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(scene.journal.of(What::Started).len(), 8, "while it renews them, they are its own");

    proxy.set(move |statement| hangs(statement).then_some(Cut::Freeze(Place::Before)));
    scene.until_resolved(30).await;
    assert!(proxy.cuts() > 0);
    let (started, cancelled) = (scene.journal.of(What::Started), scene.journal.of(What::Cancelled));
    for payload in 0..8 {
        let told = cancelled.iter().find(|e| e.payload == payload).expect("never cancelled").at;
        let again = started.iter().find(|e| e.payload == payload && e.process == 2);
        let again = again.expect("never taken over").at;
        assert!(told < again, "message {payload} was started elsewhere before it was cancelled");
    }
    proxy.set(|_| None);
    first.stop.cancel();
    assert_eq!(second.stop().await.handled, 8);
    // What the first says late, that it has handled or failed them, is refused.
    first.running.await.unwrap().unwrap();
    assert_eq!(count(&scene.db, "SELECT count(*) FROM sqlstreams.exception_queue_1").await, 0);
    assert_eq!(scene.pending().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_036_a_handler_whose_heartbeats_hang_is_cancelled_before_another_may_start() {
    let hangs = |statement: Statement<'_>| has_word(statement, "extend");
    is_cancelled_in_time("heartbeats", Mode::Parallel, Script::Endless, hangs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_036_a_handler_whose_connections_hang_is_cancelled_before_another_may_start() {
    is_cancelled_in_time("everything", Mode::Parallel, Script::HangFrom(0), |_| true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_036_a_handler_of_an_ordered_group_whose_calls_hang_is_cancelled_before_another_may_start()
 {
    let hangs = |statement: Statement<'_>| has_word(statement, "advance_lanes");
    is_cancelled_in_time("lanes", Mode::Ordered, Script::Endless, hangs).await;
}

/// A restart frees the locks that show consumers alive, and one of them takes some time to come back. Nobody takes that for
/// its death, and what runs goes on.
#[tokio::test(flavor = "multi_thread")]
async fn tb_040_a_restart_under_running_handlers_repeats_nothing() {
    let cluster = cluster().await;
    let scene = Scene::at(cluster.url("postgres"), "restart", 40, Duration::from_secs(60)).await;
    let proxy = Proxy::start(&scene.place.url).await;
    let client = Client::connect(&proxy.url).await.unwrap();
    let mut consumers = vec![scene.local_through(client, 1, 8, Script::Work(8_000)).await];
    for number in 2..=3 {
        consumers.push(scene.local(number, 8, Script::Work(8_000)).await);
    }
    let started = || scene.journal.of(What::Started).len();
    until("all of them work", Duration::from_secs(30), async || started() == 24).await;
    // Until each may judge others.
    tokio::time::sleep(Duration::from_millis(5500)).await;
    let slow = ["become_owner", "extend"];
    proxy.set(move |statement| {
        slow.iter().any(|word| has_word(statement, word)).then_some(Cut::Close(Place::Before))
    });
    restart(&cluster, false).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    proxy.set(|_| None);
    let db = crate::support::connect(&cluster.url("postgres")).await;
    let scene = Scene { db, ..scene };
    scene.until_resolved(90).await;
    let mut handled = 0;
    for consumer in consumers {
        handled += consumer.stop().await.handled;
    }
    assert_eq!(handled, 40);
    let times = scene.journal.times(What::Started);
    assert!(times.values().all(|times| *times == 1), "{times:?}");
}

/// The server crashes a moment into the take-over of 250 messages.
#[tokio::test(flavor = "multi_thread")]
async fn tb_053_a_server_that_crashes_in_the_middle_of_a_take_over() {
    let cluster = cluster().await;
    let scene = Scene::at(cluster.url("postgres"), "takeover", 250, Duration::from_secs(2)).await;
    let victim = scene.process(1, 250, Script::HangFrom(0));
    until("250 are in flight", Duration::from_secs(30), async || {
        scene.journal.of(What::Started).len() == 250
    })
    .await;
    victim.kill();
    let survivors =
        [scene.local(2, 8, Script::Work(20)).await, scene.local(3, 8, Script::Work(20)).await];
    let taken = || scene.journal.of(What::Started).len() - 250;
    until("the take-over begins", Duration::from_secs(60), async || taken() > 0).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    println!("{} of 250 were taken over before the crash", taken());
    restart(&cluster, true).await;
    let db = crate::support::connect(&cluster.url("postgres")).await;
    let scene = Scene { db, ..scene };
    scene.until_resolved(90).await;
    for survivor in survivors {
        survivor.stop().await;
    }
    let done = scene.journal.times(What::Done);
    assert_eq!(done.len(), 250, "some were never handled");
    assert_eq!(scene.group.status().await.unwrap().dead, 0);
    println!("{} were handled again", done.values().filter(|times| **times > 1).count());
}

/// What a consumer wants to say breaks off three times, in one way or another: it is said again while the lease lives.
async fn settles_in_the_end(name: &'static str, cut: Cut) {
    let scene = Scene::new(name, 50, Duration::from_secs(60)).await;
    let proxy = Proxy::start(&scene.place.url).await;
    let client = Client::connect(&proxy.url).await.unwrap();
    // All of it is claimed before the trouble begins.
    let consumer = scene.local_through(client, 1, 50, Script::Work(1000)).await;
    until("all run", Duration::from_secs(30), async || scene.journal.of(What::Started).len() == 50)
        .await;
    let left = AtomicUsize::new(3);
    proxy.set(move |statement| {
        let settles = ["advance", "extend"].iter().any(|word| has_word(statement, word));
        let again = |left: usize| left.checked_sub(1);
        let fails = settles && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, again).is_ok();
        fails.then_some(cut)
    });
    let begun = Instant::now();
    scene.until_resolved(40).await;
    println!("settled {:?} after the first failure", begun.elapsed());
    assert_eq!(proxy.cuts(), 3);
    assert_eq!(consumer.stop().await.handled, 50);
    assert_eq!(scene.journal.of(What::Started).len(), 50, "a handler ran twice");
    assert_eq!(scene.pending().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_052_a_settle_that_does_not_reach_the_server_is_retried() {
    settles_in_the_end("before", Cut::Close(Place::Before)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_052_a_settle_whose_answer_is_lost_is_retried() {
    settles_in_the_end("sent", Cut::Close(Place::Sent)).await;
}

/// The server itself refuses it for a while.
#[tokio::test(flavor = "multi_thread")]
async fn tb_052_a_settle_that_the_server_refuses_is_retried() {
    let scene = Scene::new("refused", 50, Duration::from_secs(60)).await;
    let consumer = scene.local(1, 50, Script::Work(500)).await;
    until("all run", Duration::from_secs(30), async || scene.journal.of(What::Started).len() == 50)
        .await;
    let refuse = "CREATE SEQUENCE refused;
         CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             PERFORM nextval('public.refused');
             RAISE EXCEPTION 'not now' USING ERRCODE = '53100';
         END $$;
         CREATE TRIGGER refuse BEFORE DELETE ON sqlstreams.consumer_lease_1 FOR EACH STATEMENT EXECUTE FUNCTION refuse()";
    scene.db.batch_execute(refuse).await.unwrap();
    until("it was refused", Duration::from_secs(30), async || {
        count(&scene.db, "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM refused").await
            >= 3
    })
    .await;
    scene.db.batch_execute("DROP TRIGGER refuse ON sqlstreams.consumer_lease_1").await.unwrap();
    scene.until_resolved(30).await;
    assert_eq!(consumer.stop().await.handled, 50);
    assert_eq!(scene.journal.of(What::Started).len(), 50, "a handler ran twice");
}
