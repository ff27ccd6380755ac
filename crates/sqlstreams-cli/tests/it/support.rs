//! What the tests share: the cluster, databases in it, and the program.

use std::io::Write;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use sqlstreams_dev::Cluster;

/// The cluster of this test run. Its watchdog removes it when the process ends.
pub(crate) fn cluster() -> &'static Cluster {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    CLUSTER.get_or_init(|| Cluster::builder().durable(false).start().expect("a private cluster"))
}

/// How long messages wait that were not handed back, unless told otherwise.
pub(crate) const LEASE: Duration = Duration::from_secs(15);

/// Runs SQL and returns the first column of the first row as text, if there is one.
pub(crate) fn sql(url: &str, statements: &str) -> Option<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (client, connection) =
            tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let messages = client.simple_query(statements).await.unwrap();
        messages.iter().find_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        })
    })
}

/// A new, empty database and the program pointed at it.
pub(crate) struct Bench {
    pub(crate) url: String,
    pub(crate) database: String,
}

/// What the program did.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Bench {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let database = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        sql(&cluster().url("postgres"), &format!("CREATE DATABASE {database}"));
        Self { url: cluster().url(&database), database }
    }

    /// A bench with one stream, `orders`, and these payloads in it.
    pub(crate) fn with_orders(lines: &str) -> Self {
        let bench = Self::new();
        bench.ok(&["stream", "create", "orders"]);
        if !lines.is_empty() {
            bench.run_with(&["produce", "orders"], lines.as_bytes()).assert_ok();
        }
        bench
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = program(args);
        command.env("DATABASE_URL", &self.url);
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        run(&mut self.command(args), b"")
    }

    pub(crate) fn run_with(&self, args: &[&str], input: &[u8]) -> Ran {
        run(&mut self.command(args), input)
    }

    /// Runs it, which has to succeed; returns its stdout.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        self.run(args).assert_ok().text()
    }

    /// Runs it with `--json`, and parses what it prints.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        serde_json::from_str(&self.ok(&args)).unwrap()
    }

    /// Starts it and leaves it running.
    pub(crate) fn start(&self, args: &[&str]) -> Child {
        self.command(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    pub(crate) fn sql(&self, statements: &str) -> String {
        sql(&self.url, statements).unwrap_or_default()
    }

    /// Runs SQL and keeps the connection, and with it the transaction, open.
    pub(crate) fn start_sql(&self, statements: &str) -> Session {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let client = runtime.block_on(async {
            let (client, connection) =
                tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            client.batch_execute(statements).await.unwrap();
            client
        });
        Session { client, runtime }
    }
}

/// A connection with a transaction that is open.
pub(crate) struct Session {
    client: tokio_postgres::Client,
    runtime: tokio::runtime::Runtime,
}

impl Session {
    /// Commits.
    pub(crate) fn end(&self) {
        self.runtime.block_on(self.client.batch_execute("COMMIT")).unwrap();
    }
}

impl Ran {
    #[track_caller]
    pub(crate) fn assert_ok(self) -> Self {
        self.assert_code(0)
    }

    #[track_caller]
    pub(crate) fn assert_code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.text(), self.stderr);
        self
    }

    /// It failed with one line of error that has all these words, and no dump.
    #[track_caller]
    pub(crate) fn assert_error(self, code: i32, words: &[&str]) -> Self {
        let ran = self.assert_code(code);
        let errors = ran.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(errors, 1, "{}", ran.stderr);
        for word in words {
            assert!(ran.stderr.contains(word), "{word:?} is not in: {}", ran.stderr);
        }
        for dump in ["panicked", "RUST_BACKTRACE", "Error {", "kind:", "Some("] {
            assert!(!ran.stderr.contains(dump), "{dump:?} is in: {}", ran.stderr);
        }
        ran
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The object of a `--json` error.
    pub(crate) fn error(&self) -> Value {
        let document: Value = serde_json::from_str(self.stderr.trim()).unwrap_or_else(|error| {
            panic!("{error}: {}", self.stderr);
        });
        document["error"].clone()
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        use std::os::unix::process::ExitStatusExt;
        Self {
            code: output.status.code().unwrap_or_else(|| -output.status.signal().unwrap_or(0)),
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// The program, with nothing of this process's environment that would matter to it.
pub(crate) fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sqlstreams"));
    command.args(args).env("SQLSTREAMS_UP_DIR", "/nonexistent");
    for variable in ["DATABASE_URL", "SQLSTREAMS_SCHEMA", "RUST_LOG"] {
        command.env_remove(variable);
    }
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("PG") {
            command.env_remove(variable);
        }
    }
    command
}

pub(crate) fn run(command: &mut Command, input: &[u8]) -> Ran {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let feeder = std::thread::spawn(move || {
        // It may end before it has read everything.
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    output.into()
}

/// Sends a signal to a child.
pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Waits until something is so, for 20 s at most.
#[track_caller]
pub(crate) fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "not so after 20 s: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The lines of a text, sorted.
pub(crate) fn sorted(text: &[u8]) -> Vec<Vec<u8>> {
    let mut lines: Vec<Vec<u8>> =
        text.split(|&b| b == b'\n').filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect();
    lines.sort_unstable();
    lines
}
