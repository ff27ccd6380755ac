//! Starts a private cluster and says how long each step took.
//!
//! `cargo run -p sqlstreams-dev --example time [-- MAJOR]`

use std::time::Instant;

use sqlstreams_dev::{Cluster, Programs, StopMode};

fn main() -> Result<(), sqlstreams_dev::Error> {
    let major = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let mut begun = Instant::now();
    let mut step = |name: &str| {
        println!("{name:20} {:7.1} ms", begun.elapsed().as_secs_f64() * 1000.0);
        begun = Instant::now();
    };

    let programs = Programs::find_or_obtain(major, &|line| println!("{line}"))?;
    step("find programs");
    let version = programs.version().to_owned();
    let cluster = Cluster::builder().programs(programs).start()?;
    step("first start");
    cluster.stop(StopMode::Fast)?;
    step("fast stop");
    cluster.start_again()?;
    step("start again");
    cluster.kill()?;
    step("kill");
    cluster.start_again()?;
    step("start after crash");
    println!("PostgreSQL {version} at {}", cluster.url("postgres"));
    drop(cluster);
    step("drop");
    Ok(())
}
