//! Behind PgBouncer in transaction mode.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use sqlstreams::{
    Bytes, CancellationToken, Client, Delivery, Headers, Outgoing, PayloadType, RetryPolicy,
    Transaction,
};

use crate::running::Running;
use crate::support::{cluster, connect, count, database, mostly, until};

/// A PgBouncer of our own. Its shell ends it when this value or this process goes, whichever way.
struct Pooler {
    shell: Child,
    folder: PathBuf,
    port: u16,
}

impl Pooler {
    /// With so many connections to the server for each database. `None`, loudly, where PgBouncer is not installed.
    async fn start(size: usize) -> Option<Self> {
        let Some(program) = program() else {
            eprintln!("SKIPPED: PgBouncer is not installed (scripts/setup does that)");
            return None;
        };
        for _ in 0..5 {
            let pooler = Self::try_start(&program, size);
            let url = pooler.url(&cluster().url("postgres"));
            let started = Instant::now();
            while started.elapsed() < Duration::from_secs(10) {
                if tokio_postgres::connect(&url, tokio_postgres::NoTls).await.is_ok() {
                    return Some(pooler);
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        panic!("PgBouncer does not start");
    }

    fn try_start(program: &str, size: usize) -> Self {
        // Somebody else may take it before PgBouncer does; then we try again.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let name = format!("sqlstreams-pgbouncer-{}-{port}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::DirBuilder::new().mode(0o700).create(&folder).unwrap();
        let (users, ini) = (folder.join("users.txt"), folder.join("pgbouncer.ini"));
        let cluster = cluster();
        let (user, password) = (cluster.superuser(), cluster.password());
        fs::write(&users, format!("\"{user}\" \"{password}\"\n")).unwrap();
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = scram-sha-256\nauth_file = {}\npool_mode = transaction\ndefault_pool_size = {size}\nmax_client_conn = 500\n",
            cluster.port(),
            users.display()
        );
        fs::write(&ini, settings).unwrap();
        // It refuses to be root, as PostgreSQL does: the server's account will do.
        let owner = fs::metadata(cluster.data_dir()).unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", "\"$0\" -q \"$1\" & read -r _; kill $!; wait", program]).arg(&ini);
        if owner.uid() != fs::metadata(&folder).unwrap().uid() {
            for path in [&folder, &users, &ini] {
                chown(path, Some(owner.uid()), Some(owner.gid())).unwrap();
            }
            shell.uid(owner.uid()).gid(owner.gid());
        }
        let shell = shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self { shell: shell.spawn().unwrap(), folder, port }
    }

    /// The same database, by way of the pooler.
    fn url(&self, url: &str) -> String {
        url.replace(&format!(":{}/", cluster().port()), &format!(":{}/", self.port))
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        if let Some(mut stdin) = self.shell.stdin.take() {
            let _ = stdin.write_all(b"\n");
        }
        let _ = self.shell.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn program() -> Option<String> {
    let path = std::env::var("PATH").unwrap_or_default();
    let folders = path.split(':').chain(["/usr/sbin", "/usr/local/sbin"]);
    let mut programs = folders.map(|folder| format!("{folder}/pgbouncer"));
    programs.find(|program| fs::metadata(program).is_ok_and(|found| found.is_file()))
}

/// Produce, consume, retry, redrive, transactions.
#[tokio::test(flavor = "multi_thread")]
async fn tb_068_all_of_it_works_with_two_pooled_connections_and_with_twenty() {
    for size in [2, 20] {
        let url = database().await;
        let Some(pooler) = Pooler::start(size).await else { return };
        let client = Client::connect(&pooler.url(&url)).await.unwrap();
        let other = Client::connect(&pooler.url(&url)).await.unwrap();
        let db = connect(&url).await;
        let stream = client.stream::<u64>("orders").create().await.unwrap();
        let there = other.stream::<u64>("orders").open().await.unwrap();
        let policy = RetryPolicy::attempts(2).backoff(Duration::ZERO, 1.0, Duration::ZERO);
        let group = stream.group("g").retry(policy).create().await.unwrap();
        let group_there = there.group("g").open().await.unwrap();

        let numbers: Vec<u64> = (0..2_000).collect();
        stream.producer().send_all(numbers[..1_900].iter().map(Outgoing::new)).await.unwrap();
        let producer = there.producer();
        let sending = numbers[1_900..].iter().map(|n| producer.send(n).into_future());
        futures_util::future::try_join_all(sending).await.unwrap();
        let handled = Arc::new(AtomicU32::new(0));
        let consumers = [&group, &group_there, &group]
            .map(|group| group.consumer().until_caught_up().run(mostly(&handled)));
        for consumed in futures_util::future::join_all(consumers).await {
            consumed.unwrap();
        }
        assert_eq!(handled.load(Ordering::SeqCst), 1_980, "pool of {size}");
        assert_eq!(group.redrive(None, 100).await.unwrap().len(), 20);
        let redriven = group_there.consumer().until_caught_up().run(async |_: Delivery<u64>| {});
        assert_eq!(redriven.await.unwrap().handled, 20);

        // Each effect once, with what the handlers of the other client do.
        db.batch_execute("CREATE TABLE effect (n bigint)").await.unwrap();
        let ledger = stream.group("ledger").create().await.unwrap();
        let ledger_there = there.group("ledger").open().await.unwrap();
        let out = client.stream::<u64>("out").create().await.unwrap();
        let consumers = [&ledger, &ledger_there].map(|group| {
            let out = out.clone();
            let consumer = group.consumer().concurrency(4).until_caught_up();
            consumer.run_transactional(move |message: Delivery<u64>, tx: Transaction| {
                let out = out.clone();
                async move {
                    let n = i64::try_from(message.payload)?;
                    tx.execute("INSERT INTO effect VALUES ($1)", &[&n]).await?;
                    out.send_in(&*tx, &message.payload).await?;
                    if message.payload % 500 == 3 && message.attempt() == 1 {
                        return Err("once".into());
                    }
                    Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
                }
            })
        });
        for consumed in futures_util::future::join_all(consumers).await {
            consumed.unwrap();
        }
        for table in ["effect", "sqlstreams.message_log_2"] {
            assert_eq!(count(&db, &format!("SELECT count(*) FROM {table}")).await, 2_000);
        }
        assert_eq!(count(&db, "SELECT count(DISTINCT n) FROM effect").await, 2_000);

        let mut consumer = Running::start(&group_there);
        for n in 0..5 {
            stream.producer().send(&n).await.unwrap();
            consumer.handles(n, Duration::from_secs(30)).await;
        }
        consumer.stop().await;
    }
}

/// Nobody takes a connection for a session of its own for long, however the traffic of others has the pooler pass them round.
#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_is_noticed_under_traffic() {
    let url = database().await;
    let Some(pooler) = Pooler::start(20).await else { return };
    let client = Client::connect(&pooler.url(&url)).await.unwrap();
    let stream = client.stream::<u64>("orders").create().await.unwrap();
    let stop = CancellationToken::new();
    let senders: Vec<_> = (0..8)
        .map(|_| {
            let (producer, stop) = (stream.producer(), stop.clone());
            tokio::spawn(async move {
                while !stop.is_cancelled() {
                    producer.send(&1).await.unwrap();
                }
            })
        })
        .collect();
    let mut consumers = Vec::new();
    for n in 0..20 {
        let client = Client::connect(&pooler.url(&url)).await.unwrap();
        let stream = client.stream::<u64>("orders").open().await.unwrap();
        let group = stream.group(format!("g{n}")).create().await.unwrap();
        consumers.push(Running::start(&group));
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let listening = || consumers.iter().filter(|c| c.health.snapshot().listening).count();
    println!("{} of 20 believe that they listen", listening());
    until("nobody believes to listen", Duration::from_secs(30), async || listening() == 0).await;
    stop.cancel();
    for sender in senders {
        sender.await.unwrap();
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(listening(), 0);
    for consumer in consumers {
        let snapshot = consumer.health.snapshot();
        assert!(snapshot.consumed.handled > 0 && snapshot.trouble.is_none(), "{snapshot:?}");
        consumer.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_072_a_pause_reaches_all_consumers() {
    let url = database().await;
    let Some(pooler) = Pooler::start(4).await else { return };
    let mut consumers = Vec::new();
    for _ in 0..4 {
        let client = Client::connect(&pooler.url(&url)).await.unwrap();
        let stream = client.stream::<u64>("orders").create_if_missing().await.unwrap();
        let group = stream.group("g").create_if_missing().await.unwrap();
        consumers.push((Running::start(&group), stream, group));
    }
    let stop = CancellationToken::new();
    let (sender, stopped) = (consumers[0].1.producer(), stop.clone());
    let sending = tokio::spawn(async move {
        let mut sent = 0_u64;
        while !stopped.is_cancelled() {
            sender.send(&sent).await.unwrap();
            sent += 1;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        sent
    });
    let handled = || consumers.iter().map(|c| c.0.health.snapshot().consumed.handled).sum::<u64>();
    for round in 0..3 {
        let before = handled();
        until("they work", Duration::from_secs(30), async || handled() > before + 20).await;
        // By one of them, or by somebody who is not pooled.
        consumers[round].2.pause().await.unwrap();
        // A poll is a second; the rest is for the machine.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let paused = handled();
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(handled(), paused, "some go on");
        consumers[3].2.resume().await.unwrap();
    }
    stop.cancel();
    let sent = sending.await.unwrap();
    until("all are handled", Duration::from_secs(30), async || handled() >= sent).await;
    assert_eq!(handled(), sent);
    for (consumer, ..) in consumers {
        consumer.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tb_070_every_kind_of_payload_and_nothing_at_all_come_through() {
    let url = database().await;
    let Some(pooler) = Pooler::start(2).await else { return };
    let client = Client::connect(&pooler.url(&url)).await.unwrap();

    let value = serde_json::json!({"a": [null, true, 1.5, "ö\n\"'\\"], "": {}});
    for payload_type in [PayloadType::Json, PayloadType::Jsonb, PayloadType::Text] {
        let name = payload_type.to_string();
        let stream = client.stream::<serde_json::Value>(&name).payload_type(payload_type);
        let stream = stream.create().await.unwrap();
        let headers: Headers = [("h".to_owned(), "v".into())].into_iter().collect();
        let producer = stream.producer();
        let with = producer.send(&value).key("k'\\").routing_key("r.s").headers(headers.clone());
        with.await.unwrap();
        producer.send(&serde_json::Value::Null).await.unwrap();
        let read = stream.read(&[1, 2]).await.unwrap();
        assert_eq!((&read[0].payload, &read[1].payload), (&value, &serde_json::Value::Null));
        assert_eq!(read[0].key.as_deref(), Some("k'\\"));
        assert_eq!(read[0].routing_key.as_deref(), Some("r.s"));
        assert_eq!(read[0].headers, headers);
        assert!(read[1].key.is_none() && read[1].routing_key.is_none());
        assert!(read[1].headers.is_empty());
    }

    let bytes: Vec<u8> = (0..=255).collect();
    let stream = client.stream::<Vec<u8>>("bytes").codec::<Bytes>().create().await.unwrap();
    let sent = [bytes, Vec::new()];
    stream.producer().send_all(sent.iter().map(Outgoing::new)).await.unwrap();
    let read = stream.read(&[1, 2]).await.unwrap();
    assert_eq!(read.into_iter().map(|m| m.payload).collect::<Vec<_>>(), sent);
}

/// Timeouts of the database do interrupt a DETACH here, since nothing of a session's own is set; then it is finished.
#[tokio::test(flavor = "multi_thread")]
async fn partitions_leave_the_log_through_it() {
    let scene = crate::retention::scene(crate::retention::hour()).await;
    let Some(pooler) = Pooler::start(3).await else { return };
    scene.fill(3_500).await;
    scene.consume("a").await;
    scene.a_day_later().await;
    let name = scene.url.rsplit('/').next().unwrap().split('?').next().unwrap();
    let settings = format!(
        "ALTER DATABASE {name} SET statement_timeout = '2s'; ALTER DATABASE {name} SET lock_timeout = '300ms'"
    );
    scene.db.batch_execute(&settings).await.unwrap();
    let pooled = pooler.url(&scene.url);
    let client = Client::builder(&pooled).maintenance(false).connect().await.unwrap();
    let stream = client.stream::<u64>("s").open().await.unwrap();
    let reader = connect(&scene.url).await;
    reader.batch_execute("BEGIN; SELECT count(*) FROM sqlstreams.message_log_1").await.unwrap();
    for _ in 0..3 {
        assert!(stream.retain().await.unwrap().waiting);
    }
    reader.batch_execute("COMMIT").await.unwrap();
    until("they are gone", Duration::from_secs(30), async || {
        stream.retain().await.unwrap();
        scene.partitions().await[0] == 3 && scene.strays().await == 0
    })
    .await;
    // What is the pooler's is as it was.
    let other = connect(&pooled).await;
    for _ in 0..10 {
        let row = other.simple_query("SELECT current_setting('statement_timeout') || ' ' || current_setting('lock_timeout')").await.unwrap();
        let tokio_postgres::SimpleQueryMessage::Row(row) =
            row.iter().find(|m| matches!(m, tokio_postgres::SimpleQueryMessage::Row(_))).unwrap()
        else {
            panic!()
        };
        assert_eq!(row.get(0), Some("2s 300ms"));
    }
}
