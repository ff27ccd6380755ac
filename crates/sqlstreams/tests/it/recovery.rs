//! Recovery to an earlier point: a base backup, the archived log of the server, and consumers that ran on.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlstreams::{CancellationToken, Delivery, Group, Mode, RetryPolicy, Severity, Start};
use sqlstreams_dev::{Cluster, StopMode};

use crate::doctor::{codes, finding};
use crate::support::{client_at, connect, count, eventually, until};

/// A cluster that archives its log beside its data, and knows how to be recovered from there.
struct Archived {
    cluster: Cluster,
    /// Where its data and the copies of it are.
    folder: PathBuf,
}

impl Archived {
    fn start() -> Self {
        let cluster = Cluster::builder()
            .durable(true)
            .setting("archive_mode", "on")
            // Commands run in the data folder.
            .setting("archive_command", "mkdir -p ../archive && cp %p ../archive/%f")
            .setting("restore_command", "cp ../archive/%f %p")
            .start()
            .unwrap();
        let folder = cluster.data_dir().parent().unwrap().to_owned();
        Self { cluster, folder }
    }

    /// Copies the data folder while the server works on it.
    async fn back_up(&self) {
        let session = connect(&self.cluster.url("postgres")).await;
        session.batch_execute("SELECT pg_backup_start('test', true)").await.unwrap();
        let (from, to) = (self.cluster.data_dir().to_owned(), self.folder.join("backup"));
        let copy = move || {
            // Files that go meanwhile are no failure.
            Command::new("cp").arg("-a").args([&from, &to]).output().unwrap();
            for gone in ["postmaster.pid", "postmaster.opts"] {
                let _ = fs::remove_file(to.join(gone));
            }
            fs::remove_dir_all(to.join("pg_wal")).unwrap();
            fs::create_dir_all(to.join("pg_wal/archive_status")).unwrap();
            to
        };
        let to = tokio::task::spawn_blocking(copy).await.unwrap();
        let label = session.query_one("SELECT labelfile FROM pg_backup_stop()", &[]).await.unwrap();
        fs::write(to.join("backup_label"), label.get::<_, &str>(0)).unwrap();
    }

    /// Marks a point to which it can be recovered.
    async fn mark(&self, name: &str) {
        let db = connect(&self.cluster.url("postgres")).await;
        db.batch_execute(&format!("SELECT pg_create_restore_point('{name}')")).await.unwrap();
        let file = "SELECT pg_walfile_name(pg_switch_wal())";
        let file: String = db.query_one(file, &[]).await.unwrap().get(0);
        let file = self.folder.join("archive").join(file);
        until("it is archived", Duration::from_secs(60), async || file.exists()).await;
    }

    /// Brings the server back as it was there, at the same address.
    fn recover(&self, name: &str) {
        self.cluster.stop(StopMode::Immediate).unwrap();
        let (data, backup) = (self.cluster.data_dir(), self.folder.join("backup"));
        fs::rename(data, self.folder.join("before")).unwrap();
        fs::rename(backup, data).unwrap();
        let target =
            format!("recovery_target_name = '{name}'\nrecovery_target_action = 'promote'\n");
        let settings = data.join("postgresql.auto.conf");
        let all = fs::read_to_string(&settings).unwrap() + &target;
        fs::write(&settings, all).unwrap();
        fs::write(data.join("recovery.signal"), "").unwrap();
        let mut owner = std::ffi::OsString::from("--reference=");
        owner.push(&self.folder);
        let owned = Command::new("chown").arg("-R").arg(owner).arg(data).status().unwrap();
        assert!(owned.success());
        self.cluster.start_again().unwrap();
    }
}

/// What a consumer of the group keeps elsewhere of what it has handled: payloads by id.
type Notes = Arc<Mutex<Vec<(i64, u64)>>>;

fn noting(notes: &Notes) -> impl Fn(Delivery<u64>) -> std::future::Ready<()> + use<> {
    let notes = notes.clone();
    move |message| {
        notes.lock().unwrap().push((message.id, message.payload));
        std::future::ready(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tb_150_recovered_to_an_earlier_point_nothing_is_lost_and_no_id_is_used_again() {
    let archived = Arc::new(tokio::task::spawn_blocking(Archived::start).await.unwrap());
    let url = archived.cluster.url("postgres");
    let (client, db) = client_at(&url).await;
    let stream = client.stream::<u64>("s").partition_size(1000).create().await.unwrap();
    let producer = stream.producer();
    let send = async |from: u64, to: u64| {
        for n in from..to {
            producer.send(&n).key(format!("k{}", n % 5)).await.unwrap();
        }
    };
    send(0, 100).await;
    archived.back_up().await;
    send(100, 200).await;
    producer.send(&9_999).delay(Duration::from_secs(3600)).await.unwrap();
    producer.send(&8_888).idempotency_key("before").await.unwrap();

    // At that point: groups of each mode that have come half way, with a dead letter; and one whose consumer lives through all of it, with messages in hand.
    let mut groups: Vec<Group<u64>> = Vec::new();
    for mode in [Mode::Parallel, Mode::Ordered, Mode::Fair] {
        let once = RetryPolicy::attempts(1);
        let group = stream.group(mode.as_str()).mode(mode).retry(once).create().await.unwrap();
        let fails = async |m: Delivery<u64>| if m.payload == 7 { Err("no") } else { Ok(()) };
        group.consumer().until_caught_up().run(fails).await.unwrap();
        groups.push(group);
    }
    let behind = stream.group("behind").start(Start::Beginning).create().await.unwrap();
    let lives = stream.group("lives").start(Start::Beginning).create().await.unwrap();
    let (stop, notes, release) =
        (CancellationToken::new(), Notes::default(), CancellationToken::new());
    let (write, wait) = (noting(&notes), release.clone());
    let handler = move |message: Delivery<u64>| {
        let (payload, wait) = (message.payload, wait.clone());
        let noted = write(message);
        async move {
            noted.await;
            if payload == 50 && !wait.is_cancelled() {
                wait.cancelled().await;
            }
        }
    };
    let living = tokio::spawn(lives.consumer().concurrency(4).stop_on(stop.clone()).run(handler));
    eventually(async || notes.lock().unwrap().len() >= 150).await;
    archived.mark("here").await;
    let head = stream.info().await.unwrap().head;
    let at_mark = stream.groups().await.unwrap();
    let log = "SELECT count(*) FROM sqlstreams.message_log_1";
    let messages = count(&db, log).await;

    // And after it.
    send(1_000, 1_300).await;
    producer.send(&7_777).idempotency_key("after").await.unwrap();
    let after = Notes::default();
    for group in &groups {
        group.consumer().until_caught_up().run(noting(&after)).await.unwrap();
        assert_eq!(group.redrive(None, 10).await.unwrap().len(), 1);
    }
    let forgotten: BTreeSet<i64> =
        after.lock().unwrap().iter().map(|(id, _)| *id).filter(|id| *id > head).collect();
    assert!(forgotten.len() > 300);
    let recover = archived.clone();
    tokio::task::spawn_blocking(move || recover.recover("here")).await.unwrap();

    let mut db = None;
    until("it is recovered", Duration::from_secs(60), async || {
        let Ok((session, connection)) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await
        else {
            return false;
        };
        tokio::spawn(connection);
        let done = count(&session, "SELECT (NOT pg_is_in_recovery())::int::bigint").await == 1;
        db = Some(session);
        done
    })
    .await;
    let db = db.unwrap();
    assert_eq!(count(&db, log).await, messages);
    // That is all that the doctor has to say.
    let (client, _) = client_at(&url).await;
    let doctor = client.doctor();
    let found = finding(&doctor).await;
    assert_eq!((found.code.as_str(), found.severity), ("restored", Severity::Warning));
    assert!(found.message.contains("on timeline 2, and was on 1"), "{found:?}");
    doctor.repair(&found).await.unwrap();
    assert_eq!(codes(&doctor).await, [""; 0]);
    let stream = client.stream::<u64>("s").open().await.unwrap();
    let restored = stream.groups().await.unwrap();
    for (was, is) in at_mark.iter().zip(&restored).filter(|(was, _)| was.group != "lives") {
        assert_eq!(
            (was.claimed, was.resolved, was.dead),
            (is.claimed, is.resolved, is.dead),
            "{}",
            was.group
        );
    }

    // No id is used again, whatever was sent meanwhile; what was sent after that point is not known, and may be sent again.
    let producer = stream.producer();
    let again = producer.send(&8_888).idempotency_key("before").await.unwrap();
    assert!(again.is_duplicate() && again.id <= head);
    let again = producer.send(&7_777).idempotency_key("after").await.unwrap();
    assert!(!again.is_duplicate() && again.id > head + 1_000_000);
    for n in 2_000..2_100 {
        let id = producer.send(&n).key(format!("k{}", n % 5)).await.unwrap().id;
        assert!(id > head + 1_000_000 && !forgotten.contains(&id), "{id}");
    }
    let waiting = stream.delayed(None, 9).await.unwrap();
    assert_eq!(waiting.iter().map(|d| d.payload).collect::<Vec<_>>(), [9_999]);

    // Groups go on where they were then.
    let ids = "SELECT id FROM sqlstreams.message_log_1 ORDER BY id";
    let ids: Vec<i64> = db.query(ids, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    let new: BTreeSet<i64> = ids.iter().copied().filter(|id| *id > head).collect();
    assert_eq!(new.len(), 101);
    for group in ["parallel", "ordered", "fair"] {
        let group = stream.group(group).open().await.unwrap();
        let notes = Notes::default();
        group.consumer().until_caught_up().run(noting(&notes)).await.unwrap();
        let seen: Vec<i64> = notes.lock().unwrap().iter().map(|(id, _)| *id).collect();
        assert_eq!(seen.len(), new.len(), "{group:?}");
        assert_eq!(seen.into_iter().collect::<BTreeSet<_>>(), new, "{group:?}");
        assert_eq!(group.redrive(None, 10).await.unwrap(), [8]);
    }
    let notes_behind = Notes::default();
    let consumed = stream.group("behind").open().await.unwrap();
    consumed.consumer().until_caught_up().run(noting(&notes_behind)).await.unwrap();
    assert_eq!(notes_behind.lock().unwrap().len(), ids.len());
    drop(behind);

    // The consumer that ran on, with leases that are not there any more, handles all that is in the log.
    release.cancel();
    let lives = stream.group("lives").open().await.unwrap();
    until("all is resolved", Duration::from_secs(60), async || {
        let status = lives.status().await.unwrap();
        status.resolved == status.head && status.ready + status.inflight == 0
    })
    .await;
    stop.cancel();
    living.await.unwrap().unwrap();
    let seen: BTreeSet<i64> = notes.lock().unwrap().iter().map(|(id, _)| *id).collect();
    assert!(ids.iter().all(|id| seen.contains(id)), "messages that its consumer never had");
    tokio::task::spawn_blocking(move || drop(archived)).await.unwrap();
}
