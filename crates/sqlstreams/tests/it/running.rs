//! Consumers that tell what they handle.

use std::time::{Duration, Instant};

use sqlstreams::{CancellationToken, Consumed, Delivery, Group, Health};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// A consumer in a task, that passes on what it handles.
pub struct Running {
    pub health: Health,
    pub handled: mpsc::UnboundedReceiver<u64>,
    stop: CancellationToken,
    task: JoinHandle<sqlstreams::Result<Consumed>>,
}

impl Running {
    pub fn start(group: &Group<u64>) -> Self {
        let (tell, handled) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let consumer = group.consumer().stop_on(stop.clone());
        let health = consumer.health();
        let task = tokio::spawn(consumer.run(move |message: Delivery<u64>| {
            let _ = tell.send(message.payload);
            async {}
        }));
        Self { health, handled, stop, task }
    }

    /// Waits until this message is handled, and passes over others.
    pub async fn handles(&mut self, payload: u64, limit: Duration) {
        let handled = async {
            while let Some(next) = self.handled.recv().await {
                if next == payload {
                    return;
                }
            }
            panic!("the consumer has ended");
        };
        if tokio::time::timeout(limit, handled).await.is_err() {
            panic!("message {payload} was not handled within {limit:?}: {:?}", self.health);
        }
    }

    /// How long a message takes to the handler, sent after a pause in which consumers settle to look about once a second.
    pub async fn latency(&mut self, send: impl AsyncFn(u64)) -> Duration {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let payload = fastrand::u64(1 << 32..1 << 52);
        let sent = Instant::now();
        send(payload).await;
        self.handles(payload, Duration::from_secs(20)).await;
        sent.elapsed()
    }

    pub async fn stop(self) -> Consumed {
        self.stop.cancel();
        self.task.await.unwrap().unwrap()
    }
}
