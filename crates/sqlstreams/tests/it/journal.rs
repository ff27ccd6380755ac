//! What handlers did, in this process and in others: who started which message when, and how that ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use sqlstreams::Delivery;

/// What happened to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    Started,
    Done,
    Failed,
    /// Its handler saw that the lease was about to end.
    Cancelled,
}

#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// A number of the test's own; each process has another.
    pub process: u32,
    pub what: What,
    pub payload: u64,
    /// By the clock of the one machine on which all processes run.
    pub at: SystemTime,
}

/// How a handler deals with messages.
#[derive(Debug, Clone, Copy)]
pub enum Script {
    /// Takes so many milliseconds for each.
    Work(u64),
    /// Finishes payloads below this at once; with the others it waits for the end of the lease, and then claims that it has
    /// handled them, or where the payload is odd, that it has failed.
    HangFrom(u64),
    /// Never ends, whatever becomes of the lease.
    Endless,
    /// Kills its process at this payload, and takes a fifth of a second for others.
    DieAt(u64),
    /// Takes up to so many microseconds, always fails one in 2,000 messages, and one in 50 every other time.
    Flaky(u64),
}

#[derive(Debug, Clone, Default)]
pub struct Journal(Arc<Mutex<Vec<Entry>>>);

impl Journal {
    pub fn note(&self, process: u32, what: What, payload: u64) {
        self.add(Entry { process, what, payload, at: SystemTime::now() });
    }

    pub fn add(&self, entry: Entry) {
        self.0.lock().unwrap().push(entry);
    }

    /// In the order in which things happened.
    pub fn entries(&self) -> Vec<Entry> {
        let mut entries = self.0.lock().unwrap().clone();
        entries.sort_by_key(|e| e.at);
        entries
    }

    pub fn of(&self, what: What) -> Vec<Entry> {
        self.entries().into_iter().filter(|e| e.what == what).collect()
    }

    /// How often this happened to each message.
    pub fn times(&self, what: What) -> BTreeMap<u64, usize> {
        let mut times = BTreeMap::new();
        self.of(what).iter().for_each(|e| *times.entry(e.payload).or_default() += 1);
        times
    }

    /// The messages to which this happened anywhere.
    pub fn payloads_of(&self, what: What) -> BTreeSet<u64> {
        self.of(what).iter().map(|e| e.payload).collect()
    }

    /// The messages to which this happened in a process.
    pub fn payloads(&self, process: u32, what: What) -> BTreeSet<u64> {
        self.of(what).iter().filter(|e| e.process == process).map(|e| e.payload).collect()
    }

    /// A handler that follows a script and notes what it does.
    pub fn handler(
        &self,
        process: u32,
        script: Script,
    ) -> impl Fn(Delivery<u64>) -> BoxFuture<'static, Result<(), &'static str>> + use<> {
        let journal = self.clone();
        move |delivery| {
            let journal = journal.clone();
            let payload = delivery.payload;
            Box::pin(act(script, delivery, move |what| journal.note(process, what, payload)))
        }
    }
}

pub async fn act(
    script: Script,
    delivery: Delivery<u64>,
    note: impl Fn(What) + Send,
) -> Result<(), &'static str> {
    note(What::Started);
    match script {
        Script::Work(milliseconds) => tokio::time::sleep(Duration::from_millis(milliseconds)).await,
        Script::HangFrom(first) if delivery.payload >= first => {
            delivery.context.cancellation().cancelled().await;
            note(What::Cancelled);
            return if delivery.payload.is_multiple_of(2) { Ok(()) } else { Err("too late") };
        }
        Script::HangFrom(_) => {}
        Script::Endless => {
            delivery.context.cancellation().cancelled().await;
            note(What::Cancelled);
            std::future::pending().await
        }
        Script::DieAt(payload) if delivery.payload == payload => {
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
            std::future::pending().await
        }
        Script::Flaky(most) => {
            let over = delivery.context.cancellation();
            let work = Duration::from_micros(fastrand::u64(0..most));
            tokio::select! {
                biased;
                () = over.cancelled() => {
                    note(What::Cancelled);
                    return Err("cancelled");
                }
                () = tokio::time::sleep(work) => {}
            }
            // Of all keys alike.
            let hash = delivery.payload.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            if hash % 2_000 == 7 || hash % 50 == 3 && fastrand::bool() {
                note(What::Failed);
                return Err("by chance");
            }
        }
        Script::DieAt(_) => tokio::time::sleep(Duration::from_millis(200)).await,
    }
    note(What::Done);
    Ok(())
}
