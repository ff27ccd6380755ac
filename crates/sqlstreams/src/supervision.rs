//! What becomes of a consumer when one of the crate's own tasks panics. Inside the crate, as that takes a defect.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sqlstreams_dev::Cluster;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{Client, Delivery, ErrorKind, Stream};

/// The tasks that panic on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    Watcher,
    Bell,
    Keeper,
    Coordinator,
}

/// Which task is to panic next.
#[derive(Debug, Default)]
pub(crate) struct Faults(Mutex<Option<Task>>);

impl Faults {
    fn plan(&self, task: Task) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }

    fn is_planned(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Panics if that is planned for the task that calls.
    pub(crate) fn strike(&self, task: Task) {
        let struck = {
            let mut planned = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            planned.take_if(|planned| *planned == task).is_some()
        };
        assert!(!struck, "a planned panic of {task:?}");
    }
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..1_500 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("not within 30 s: {what}");
}

async fn send(stream: &Stream<u64>, number: u64) {
    stream.producer().send(&number).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_that_panic_are_started_again_or_end_the_consumer() {
    let start = || Cluster::builder().durable(false).start().unwrap();
    let cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let url = cluster.url("postgres");
    // Apart, so that messages are not known of within the process.
    let stream = Client::connect(&url).await.unwrap();
    let stream = stream.stream::<u64>("numbers").create().await.unwrap();
    let client = Client::connect(&url).await.unwrap();
    let group = client.stream::<u64>("numbers").open().await.unwrap().group("g");
    let group = group.lease(Duration::from_secs(2)).create().await.unwrap();

    // The consumer goes on.
    let (tell, mut handled) = mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let consumer = group.consumer().stop_on(stop.clone());
    let health = consumer.health();
    let running = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
        let _ = tell.send(message.payload);
        async {}
    }));
    for number in 0..3 {
        send(&stream, number).await;
        assert_eq!(handled.recv().await, Some(number));
        eventually("it listens", || health.snapshot().listening).await;
        let life = *client.inner.watcher.life().borrow();
        client.inner.faults.plan(Task::Watcher);
        eventually("the watcher has panicked", || !client.inner.faults.is_planned()).await;
        eventually("another life begins", || {
            let now = *client.inner.watcher.life().borrow();
            now.is_some() && now != life
        })
        .await;
    }
    send(&stream, 3).await;
    assert_eq!(handled.recv().await, Some(3));

    // Rings are heard again.
    stream.inner.client.inner.faults.plan(Task::Bell);
    stream.ring();
    send(&stream, 4).await;
    assert_eq!(handled.recv().await, Some(4));
    eventually("the bell has panicked", || !stream.inner.client.inner.faults.is_planned()).await;
    eventually("it is known", || !stream.inner.client.inner.bell.is_ringing()).await;
    send(&stream, 5).await;
    assert_eq!(handled.recv().await, Some(5));
    stop.cancel();
    assert_eq!(running.await.unwrap().unwrap().handled, 6);

    // The consumer ends, with an error; whoever comes next handles what it had.
    for task in [Task::Coordinator, Task::Keeper] {
        client.inner.faults.plan(task);
        let consumer = group.consumer().shutdown_timeout(Duration::from_millis(100));
        let running = tokio::spawn(consumer.run(|_: Delivery<u64>| std::future::pending::<()>()));
        send(&stream, 6).await;
        let ended = tokio::time::timeout(Duration::from_secs(30), running).await;
        let error = ended.expect("run() ends").unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{task:?}");
    }
    let consumed = group.consumer().until_caught_up().run(|_: Delivery<u64>| async {}).await;
    assert_eq!(consumed.unwrap().handled, 2);
}
