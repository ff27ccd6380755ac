//! Throw-away clusters.

use std::thread;

use sqlstreams_dev::{Cluster, Error, Programs, StopMode};

use crate::support::{folder_of, is_alive, is_empty, open_folder, query, script};

fn quick() -> Cluster {
    Cluster::builder().durable(false).start().expect("a cluster starts")
}

#[test]
fn answers_with_the_promised_settings() {
    let cluster = Cluster::start().expect("a cluster starts");
    let show = |name: &str| {
        query(&cluster.url("postgres"), &format!("SHOW {name}")).expect("the server answers")
    };
    for (name, value) in [
        ("server_encoding", "UTF8"),
        ("TimeZone", "UTC"),
        ("fsync", "on"),
        ("synchronous_commit", "on"),
        ("full_page_writes", "on"),
        ("max_connections", "200"),
        ("max_prepared_transactions", "64"),
        ("shared_buffers", "256MB"),
        ("listen_addresses", "127.0.0.1"),
        ("unix_socket_directories", ""),
    ] {
        assert_eq!(show(name), value, "{name}");
    }
    let version = show("server_version_num");
    assert!(version.starts_with(&cluster.major().to_string()), "{version}");
}

#[test]
fn own_settings_win() {
    let cluster = Cluster::builder()
        .durable(false)
        .setting("work_mem", "7MB")
        .setting("fsync", "on")
        .setting("search_path", r#""it's", public"#)
        .start()
        .expect("a cluster starts");
    let url = cluster.url("postgres");
    let show = |name: &str| query(&url, &format!("SHOW {name}")).expect("the server answers");
    assert_eq!(show("work_mem"), "7MB");
    assert_eq!(show("fsync"), "on");
    assert_eq!(show("full_page_writes"), "off");
    assert_eq!(show("search_path"), r#""it's", public"#);
}

#[test]
fn wants_the_password() {
    let cluster = quick();
    let url = cluster.url("postgres").replace(cluster.password(), "not-the-password");
    let error = query(&url, "SELECT 1").expect_err("a wrong password is refused");
    assert_eq!(error.code().map(|code| code.code()), Some("28P01"), "{error}");
}

#[test]
fn a_database_may_have_any_name() {
    let cluster = quick();
    let name = "a b/ü?#%";
    query(&cluster.url("postgres"), &format!(r#"CREATE DATABASE "{name}""#))
        .expect("the server obeys");
    let found = query(&cluster.url(name), "SELECT current_database()");
    assert_eq!(found.expect("the server answers"), name);
}

#[test]
fn several_at_once() {
    let clusters: Vec<Cluster> = (0..4)
        .map(|_| thread::spawn(quick))
        .collect::<Vec<_>>()
        .into_iter()
        .map(|thread| thread.join().expect("no panic"))
        .collect();
    for cluster in &clusters {
        let port = query(&cluster.url("postgres"), "SHOW port").expect("the server answers");
        assert_eq!(port, cluster.port().to_string());
    }
}

#[test]
fn gone_after_drop() {
    let cluster = quick();
    let pid = cluster.pid().expect("it runs");
    let data_dir = cluster.data_dir().to_path_buf();
    assert!(is_alive(pid));
    assert!(folder_of(&data_dir).is_dir());
    drop(cluster);
    assert!(!is_alive(pid));
    assert!(!folder_of(&data_dir).exists());
}

#[test]
fn gone_after_drop_when_stopped_or_killed() {
    for end in
        [|cluster: &Cluster| cluster.stop(StopMode::Fast), |cluster: &Cluster| cluster.kill()]
    {
        let cluster = quick();
        let data_dir = cluster.data_dir().to_path_buf();
        end(&cluster).expect("it ends");
        drop(cluster);
        assert!(!folder_of(&data_dir).exists());
    }
}

#[test]
fn keeps_data_and_address_over_stops_and_crashes() {
    let cluster = Cluster::start().expect("a cluster starts");
    let url = cluster.url("postgres");
    query(&url, "CREATE TABLE t (n int)").expect("the server obeys");
    let ends: [fn(&Cluster) -> sqlstreams_dev::Result<()>; 3] = [
        |cluster| cluster.stop(StopMode::Fast),
        |cluster| cluster.stop(StopMode::Immediate),
        Cluster::kill,
    ];
    for (n, end) in ends.iter().enumerate() {
        query(&url, &format!("INSERT INTO t VALUES ({n})")).expect("the server obeys");
        let before = cluster.pid();
        end(&cluster).expect("it ends");
        assert!(!cluster.is_running());
        assert!(query(&url, "SELECT 1").is_err());
        cluster.start_again().expect("it comes back");
        assert!(cluster.is_running());
        assert_ne!(cluster.pid(), before);
        assert_eq!(cluster.url("postgres"), url);
    }
    let found = query(&url, "SELECT string_agg(n::text, ',' ORDER BY n) FROM t");
    assert_eq!(found.expect("the server answers"), "0,1,2");
}

#[test]
fn comes_back_while_clients_of_the_killed_server_are_at_work() {
    let cluster = Cluster::start().expect("a cluster starts");
    let url = cluster.url("postgres");
    for _ in 0..3 {
        let busy: Vec<_> = (0..4)
            .map(|_| {
                let url = url.clone();
                thread::spawn(move || query(&url, "SELECT count(*) FROM generate_series(1, 3e6)"))
            })
            .collect();
        thread::sleep(std::time::Duration::from_millis(100));
        cluster.kill().expect("it dies");
        cluster.start_again().expect("it comes back");
        for thread in busy {
            // With or without an answer, as it happens.
            let _ = thread.join().expect("no panic");
        }
        query(&url, "SELECT 1").expect("the server answers");
    }
}

#[test]
fn starts_once_only() {
    let cluster = quick();
    let error = cluster.start_again().expect_err("it runs already");
    assert!(matches!(error, Error::AlreadyRunning { .. }), "{error}");
}

#[test]
fn a_failed_start_shows_the_log_and_leaves_nothing() {
    let base = open_folder();
    let error = Cluster::builder()
        .base_dir(base.path())
        .setting("shared_buffers", "a lot")
        .start()
        .expect_err("nonsense is refused");
    let text = error.to_string();
    assert!(matches!(error, Error::Start { .. }), "{text}");
    assert!(text.contains("shared_buffers"), "{text}");
    assert!(is_empty(base.path()));
}

#[test]
fn a_failed_initdb_shows_what_it_said_and_leaves_nothing() {
    let base = open_folder();
    let programs = open_folder();
    script(programs.path(), "postgres", "echo 'postgres (PostgreSQL) 17.1'");
    script(programs.path(), "initdb", "echo no luck today; exit 3");
    let programs = Programs::in_folder(programs.path()).expect("they look right");
    let error = Cluster::builder()
        .base_dir(base.path())
        .programs(programs)
        .start()
        .expect_err("initdb failed");
    let text = error.to_string();
    assert!(matches!(error, Error::Initdb { .. }), "{text}");
    assert!(text.contains("no luck today"), "{text}");
    assert!(is_empty(base.path()));
}

#[test]
fn refuses_a_setting_that_could_be_two() {
    let error = Cluster::builder()
        .setting("work_mem", "1MB'\nport = 5432")
        .start()
        .expect_err("a value is one line");
    assert!(matches!(error, Error::BadSetting { .. }), "{error}");
}
