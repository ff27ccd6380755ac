//! Dumps and restores: of everything, of data alone, of one schema.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use sqlstreams::{Client, Delivery, GroupStatus, Mode, Outgoing, RetryPolicy, Severity, Stream};
use sqlstreams_dev::Cluster;

use crate::doctor::{codes, finding};
use crate::support::{client_at, cluster, connect, count, database};

/// One of PostgreSQL's programs. These tests are about them: without, they fail.
fn tool(name: &str) -> PathBuf {
    let programs = cluster().programs();
    programs.tool(name).unwrap_or_else(|| {
        panic!(
            "{} has no {name}: install PostgreSQL's client programs of version {} there, without which backups cannot be tested",
            programs.folder().display(),
            programs.major()
        )
    })
}

/// Runs it; what it prints. It has to succeed.
async fn run(name: &str, args: &[&str]) -> String {
    let mut command = Command::new(tool(name));
    command.args(args);
    let ran = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{name} {args:?}: {said}");
    String::from_utf8(ran.stdout).unwrap()
}

/// A folder that goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let folder =
            std::env::temp_dir().join(format!("sqlstreams-backup-{:032x}", fastrand::u128(..)));
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(Path::new(&self.0));
    }
}

/// An installation in the middle of its work: what one would miss after a restore.
struct Scene {
    orders: Stream<u64>,
    prices: Stream<Option<u64>>,
}

const MODES: [Mode; 3] = [Mode::Parallel, Mode::Ordered, Mode::Fair];

impl Scene {
    async fn make(client: &Client) -> Self {
        let orders = client.stream::<u64>("orders").partition_size(1000).create().await.unwrap();
        let prices = client.stream::<Option<u64>>("prices").compacted(true).create().await.unwrap();
        let producer = orders.producer();
        let payloads: Vec<u64> = (0..1_500).collect();
        let keyed = payloads.iter().map(|n| Outgoing::new(n).key(format!("k{}", n % 7)));
        producer.send_all(keyed).await.unwrap();
        for mode in MODES {
            let group = orders.group(mode.as_str()).mode(mode);
            let group = group.retry(RetryPolicy::attempts(1)).create().await.unwrap();
            let handler =
                async |m: Delivery<u64>| if m.payload == 100 { Err("no") } else { Ok(()) };
            group.consumer().until_caught_up().run(handler).await.unwrap();
            orders.group(format!("new {}", mode.as_str())).mode(mode).create().await.unwrap();
        }
        // What waits for its next attempt.
        let hours = Duration::from_secs(100 * 3600);
        let later = RetryPolicy::attempts(5).backoff(hours, 1.0, hours);
        let group = orders.group("later").retry(later).create().await.unwrap();
        let stop = sqlstreams::CancellationToken::new();
        let consumer = group.consumer().stop_on(stop.clone());
        let running = tokio::spawn(
            consumer
                .run(async |m: Delivery<u64>| if m.payload == 5 { Err("not now") } else { Ok(()) }),
        );
        crate::support::eventually(async || {
            let status = group.status().await.unwrap();
            status.ready == 1 && status.claimed == status.head && status.open_leases == 0
        })
        .await;
        stop.cancel();
        running.await.unwrap().unwrap();
        for n in 0..10 {
            producer.send(&(2_000 + n)).idempotency_key(format!("key {n}")).await.unwrap();
        }
        producer.send(&3_000).delay(Duration::from_secs(7 * 24 * 3600)).await.unwrap();
        for n in 0..5 {
            prices.producer().send(&Some(n)).key("apples").await.unwrap();
        }
        Self { orders, prices }
    }

    async fn open(client: &Client) -> Self {
        Self {
            orders: client.stream::<u64>("orders").open().await.unwrap(),
            prices: client.stream::<Option<u64>>("prices").open().await.unwrap(),
        }
    }

    async fn standing(&self) -> Vec<GroupStatus> {
        self.orders.groups().await.unwrap()
    }

    /// All of it goes on where it was; `gap`: so many ids were left out.
    async fn goes_on(&self, gap: i64) {
        for mode in MODES {
            for (group, rest) in
                [(mode.as_str().to_owned(), 10), (format!("new {}", mode.as_str()), 1_510)]
            {
                let group = self.orders.group(group).open().await.unwrap();
                let handler = async |_: Delivery<u64>| Ok::<_, String>(());
                let consumed = group.consumer().until_caught_up().run(handler).await.unwrap();
                assert_eq!(consumed.handled, rest, "{group:?}");
            }
            let group = self.orders.group(mode.as_str()).open().await.unwrap();
            let redriven = group.redrive(None, 10).await.unwrap();
            assert_eq!(redriven, [101]);
            let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
            let handler = move |m: Delivery<u64>| {
                let _ = tell.send(m.payload);
                std::future::ready(Ok::<_, String>(()))
            };
            group.consumer().until_caught_up().run(handler).await.unwrap();
            assert_eq!((told.recv().await, told.recv().await), (Some(100), None));
        }
        assert_eq!(
            self.orders.group("later").open().await.unwrap().status().await.unwrap().ready,
            1
        );
        let producer = self.orders.producer();
        let again = producer.send(&2_003).idempotency_key("key 3").await.unwrap();
        assert!(again.is_duplicate(), "{again:?}");
        assert_eq!(producer.send(&4_000).await.unwrap().id, 1_511 + gap);
        let waiting = self.orders.delayed(None, 9).await.unwrap();
        assert_eq!(waiting.iter().map(|d| d.payload).collect::<Vec<_>>(), [3_000]);
        let more = producer.send(&3_001).delay(Duration::from_secs(60)).await.unwrap();
        assert!(more.id > waiting[0].id);
        assert!(self.orders.cancel_delayed(waiting[0].id).await.unwrap());
        assert_eq!(self.prices.latest("apples").await.unwrap().unwrap().payload, Some(4));
        self.prices.producer().send(&Some(9)).key("apples").await.unwrap();
        assert_eq!(self.prices.compact(Duration::ZERO, Duration::ZERO).await.unwrap().removed, 5);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_148_a_whole_dump_is_usable_elsewhere() {
    let (from, to) = (database().await, database().await);
    let (client, _) = client_at(&from).await;
    let before = Scene::make(&client).await.standing().await;
    let folder = Folder::new();
    let file = folder.path("dump");
    run("pg_dump", &["-Fc", "-f", &file, "-d", &from]).await;
    run("pg_restore", &["-d", &to, "--exit-on-error", &file]).await;

    let restored = Client::builder(&to).migrate(false).connect().await.unwrap();
    assert!(!restored.migrate().await.unwrap().changed);
    let doctor = restored.doctor();
    let found = finding(&doctor).await;
    assert_eq!((found.code.as_str(), found.severity), ("restored", Severity::Warning));
    let scene = Scene::open(&restored).await;
    assert_eq!(scene.standing().await, before);
    let db = connect(&to).await;
    let guards =
        "SELECT count(*) FROM pg_trigger WHERE tgname = 'refuse_direct_write' AND tgenabled = 'A'";
    assert_eq!(count(&db, guards).await, 5 + 4);
    doctor.repair(&found).await.unwrap();
    assert_eq!(codes(&doctor).await, [""; 0]);
    scene.goes_on(1_000_000).await;
    assert_eq!(codes(&doctor).await, [""; 0]);
}

/// Into servers of these major versions, which are downloaded where they are not here: SQLSTREAMS_RESTORE_MAJORS=16,18.
#[tokio::test(flavor = "multi_thread")]
async fn a_dump_goes_into_another_major_version() {
    let majors = std::env::var("SQLSTREAMS_RESTORE_MAJORS").unwrap_or_default();
    let majors: Vec<u32> = majors.split_terminator(',').map(|n| n.parse().unwrap()).collect();
    if majors.is_empty() {
        return;
    }
    let from = database().await;
    let (client, _) = client_at(&from).await;
    let before = Scene::make(&client).await.standing().await;
    let folder = Folder::new();
    let file = folder.path("dump");
    run("pg_dump", &["-Fc", "-f", &file, "-d", &from]).await;
    for major in majors {
        let start = move || Cluster::builder().major(major).start().unwrap();
        let server = tokio::task::spawn_blocking(start).await.unwrap();
        let to = server.url("postgres");
        run("pg_restore", &["-d", &to, "--exit-on-error", &file]).await;
        let restored = Client::builder(&to).migrate(false).connect().await.unwrap();
        let doctor = restored.doctor();
        let found = doctor.look().await.unwrap();
        println!("{} into {major}: {found:#?}", cluster().major());
        assert_eq!(codes(&doctor).await, ["restored"]);
        let scene = Scene::open(&restored).await;
        assert_eq!(scene.standing().await, before);
        doctor.repair(&found[0]).await.unwrap();
        scene.goes_on(1_000_000).await;
        assert_eq!(codes(&doctor).await, [""; 0]);
        tokio::task::spawn_blocking(move || drop(server)).await.unwrap();
    }
}

/// As docs/backup.md has it.
#[tokio::test(flavor = "multi_thread")]
async fn data_alone_goes_into_an_installation_that_is_there() {
    let (from, to) = (database().await, database().await);
    let (client, _) = client_at(&from).await;
    let before = Scene::make(&client).await.standing().await;
    let folder = Folder::new();
    let (file, list) = (folder.path("dump"), folder.path("list"));
    run(
        "pg_dump",
        &[
            "-Fc",
            "--data-only",
            "--load-via-partition-root",
            "-n",
            "sqlstreams",
            "-f",
            &file,
            "-d",
            &from,
        ],
    )
    .await;

    let (restored, db) = client_at(&to).await;
    run(
        "pg_restore",
        &["--data-only", "-n", "sqlstreams", "-t", "stream", "--exit-on-error", "-d", &to, &file],
    )
    .await;
    let doctor = restored.doctor();
    let found = codes(&doctor).await;
    assert!(
        found.contains(&"tables_missing".to_owned())
            && found.contains(&"catalog_sequence_behind".to_owned()),
        "{found:?}"
    );
    let contents = run("pg_restore", &["-l", &file]).await;
    let partitions: Vec<&str> = contents
        .split_whitespace()
        .filter(|word| word.starts_with("message_log_") && word.contains("_p"))
        .collect();
    let made: i32 =
        db.query_one("SELECT sqlstreams.prepare_restore($1)", &[&partitions]).await.unwrap().get(0);
    assert_eq!(made as usize, partitions.len());
    // Without the values of the sequences, as where tables are copied one by one.
    let rest: Vec<&str> = contents
        .lines()
        .filter(|line| {
            line.contains(" TABLE DATA ")
                && ![
                    " stream ",
                    " schema_migration ",
                    " installation ",
                    " maintenance ",
                    " log_partition ",
                ]
                .iter()
                .any(|t| line.contains(t))
        })
        .collect();
    fs::write(&list, rest.join("\n")).unwrap();
    run("pg_restore", &["--data-only", "-L", &list, "--exit-on-error", "-d", &to, &file]).await;

    let scene = Scene::open(&restored).await;
    assert!(
        scene.orders.producer().send(&0).await.is_err(),
        "ids are drawn that are there already"
    );
    for _ in 0..10 {
        for found in doctor.look().await.unwrap() {
            doctor.repair(&found).await.unwrap();
        }
    }
    assert_eq!(codes(&doctor).await, [""; 0]);
    let fixed = "SELECT count(DISTINCT action) FROM sqlstreams.audit WHERE action IN ('doctor_sequence_behind', 'doctor_delayed_sequence_behind', 'doctor_catalog_sequence_behind')";
    assert_eq!(count(&db, fixed).await, 3);
    assert_eq!(scene.standing().await, before);
    scene.goes_on(0).await;
    restored.stream::<u64>("another").create().await.unwrap();

    let error = db
        .query_one("SELECT sqlstreams.prepare_restore('{message_log_77_p0}')", &[])
        .await
        .unwrap_err();
    assert_eq!(error.code().unwrap().code(), "SQ004");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_schema_is_dumped_and_restored_beside_others() {
    let (from, to) = (database().await, database().await);
    for url in [&from, &to] {
        let other = Client::builder(url).schema("other one").connect().await.unwrap();
        let stream = other.stream::<String>("s").create().await.unwrap();
        stream.producer().send(&(*url).clone()).await.unwrap();
    }
    let (client, _) = client_at(&from).await;
    let before = Scene::make(&client).await.standing().await;
    let folder = Folder::new();
    let file = folder.path("dump");
    run("pg_dump", &["-Fc", "-n", "sqlstreams", "-f", &file, "-d", &from]).await;
    run("pg_restore", &["-d", &to, "--exit-on-error", &file]).await;
    let restored = Client::builder(&to).migrate(false).connect().await.unwrap();
    let scene = Scene::open(&restored).await;
    assert_eq!(scene.standing().await, before);
    scene.goes_on(0).await;
    assert_eq!(codes(&restored.doctor()).await, ["restored"]);
    let other = Client::builder(&to).schema("other one").migrate(false).connect().await.unwrap();
    assert_eq!(codes(&other.doctor()).await, [""; 0]);
    let stream = other.stream::<String>("s").open().await.unwrap();
    assert_eq!(
        stream.read_log(0, 9, 9).await.unwrap().records[0].payload.as_deref(),
        Some(to.as_str())
    );
}

/// A log that is older than the rest: its dump was made before the others' were.
#[tokio::test(flavor = "multi_thread")]
async fn tb_150_a_log_from_an_earlier_dump_is_detected_and_mended() {
    let url = database().await;
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").create().await.unwrap();
    let send = async |n: u64| stream.producer().send(&n).await.unwrap().id;
    for n in 0..5 {
        send(n).await;
    }
    let folder = Folder::new();
    let file = folder.path("dump");
    run(
        "pg_dump",
        &[
            "-Fc",
            "--data-only",
            "--load-via-partition-root",
            "-t",
            "sqlstreams.message_log_1*",
            "-f",
            &file,
            "-d",
            &url,
        ],
    )
    .await;
    for n in 5..9 {
        send(n).await;
    }
    let group = stream.group("g").create().await.unwrap();
    let handler = async |_: Delivery<u64>| Ok::<_, String>(());
    group.consumer().until_caught_up().run(handler).await.unwrap();
    db.batch_execute("TRUNCATE sqlstreams.message_log_1").await.unwrap();
    run("pg_restore", &["--data-only", "--exit-on-error", "-d", &url, &file]).await;
    let doctor = client.doctor();
    let found = finding(&doctor).await;
    assert_eq!((found.code.as_str(), found.severity), ("ahead_of_log", Severity::Error));
    assert!(
        found.message.contains("come to 5") && found.message.contains("cursors to 9"),
        "{found:?}"
    );
    doctor.repair(&found).await.unwrap();
    assert_eq!(send(100).await, 10);
    let consumed = group.consumer().until_caught_up().run(handler).await.unwrap();
    assert_eq!(consumed.handled, 1);
    assert_eq!(codes(&doctor).await, [""; 0]);
}
