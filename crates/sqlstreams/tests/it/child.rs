//! Consumers in processes of their own, which can be killed and frozen: this test program, run again.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use sqlstreams::{CancellationToken, Client};

use crate::journal::{Entry, Journal, Script, What, act};

/// What a process is to do; without it, this is not one.
const ORDERS: &str = "SQLSTREAMS_TEST_CHILD";

/// The place of a consumer: the group exists.
#[derive(Debug, Clone)]
pub struct Place {
    pub url: String,
    pub stream: &'static str,
    pub group: &'static str,
}

/// A running consumer. Dropped, it is killed.
pub struct Process {
    child: Child,
    /// Closed, the process ends.
    stdin: ChildStdin,
    reader: Option<std::thread::JoinHandle<Option<u64>>>,
}

impl Process {
    /// Starts one that tells the journal, as this number, what it does.
    pub fn start(
        place: &Place,
        concurrency: usize,
        script: Script,
        number: u32,
        journal: &Journal,
    ) -> Self {
        let (name, amount) = match script {
            Script::Work(amount) => ("work", amount),
            Script::HangFrom(amount) => ("hang", amount),
            Script::DieAt(amount) => ("die", amount),
            Script::Endless => ("endless", 0),
            Script::Flaky(amount) => ("flaky", amount),
        };
        let Place { url, stream, group } = place;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child::process", "--nocapture"])
            .env(ORDERS, format!("{url} {stream} {group} {concurrency} {name} {amount}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let journal = journal.clone();
        let reader = std::thread::spawn(move || {
            let mut handled = None;
            for line in BufReader::new(stdout).lines() {
                let line = line.unwrap();
                match line.split(' ').collect::<Vec<_>>().as_slice() {
                    ["~", "handled", count] => handled = Some(count.parse().unwrap()),
                    ["~", what, payload, at] => journal.add(Entry {
                        process: number,
                        what: match *what {
                            "started" => What::Started,
                            "done" => What::Done,
                            "failed" => What::Failed,
                            _ => What::Cancelled,
                        },
                        payload: payload.parse().unwrap(),
                        at: SystemTime::UNIX_EPOCH + Duration::from_nanos(at.parse().unwrap()),
                    }),
                    _ => {}
                }
            }
            handled
        });
        Self { child, stdin, reader: Some(reader) }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// SIGSTOP.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// `kill -9`; everything it said is in the journal afterwards.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.read_to_the_end();
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Asks it to stop gracefully and waits; returns how many messages it says it has handled.
    pub async fn stop(mut self) -> u64 {
        writeln!(self.stdin, "stop").unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "a consumer does not stop");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.read_to_the_end().expect("a consumer ended without a word")
    }

    fn read_to_the_end(&mut self) -> Option<u64> {
        self.reader.take().and_then(|reader| reader.join().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test: what the processes do that tests start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let orders: Vec<&str> = orders.split(' ').collect();
    let [url, stream, group, concurrency, name, amount] = orders[..] else { panic!("{orders:?}") };
    let amount = amount.parse().unwrap();
    let script = match name {
        "work" => Script::Work(amount),
        "hang" => Script::HangFrom(amount),
        "die" => Script::DieAt(amount),
        "flaky" => Script::Flaky(amount),
        _ => Script::Endless,
    };
    // Ends the line that the test harness may have begun.
    println!();
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    std::thread::spawn(move || {
        let mut line = String::new();
        match std::io::stdin().read_line(&mut line) {
            Ok(read) if read > 0 => stopping.cancel(),
            // Who started it is gone.
            _ => std::process::exit(1),
        }
    });
    let client = Client::builder(url).migrate(false).connect().await.unwrap();
    let group = client.stream::<u64>(stream).open().await.unwrap().group(group).open().await;
    let consumer = group.unwrap().consumer().concurrency(concurrency.parse().unwrap());
    let consumed = consumer.stop_on(stop).run(move |delivery| {
        let payload = delivery.payload;
        act(script, delivery, move |what| {
            let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos();
            let what = match what {
                What::Started => "started",
                What::Done => "done",
                What::Failed => "failed",
                What::Cancelled => "cancelled",
            };
            println!("~ {what} {payload} {at}");
        })
    });
    println!("~ handled {}", consumed.await.unwrap().handled);
}
