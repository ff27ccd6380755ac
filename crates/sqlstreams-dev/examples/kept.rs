//! Starts, stops or looks at a kept cluster.
//!
//! `cargo run -p sqlstreams-dev --example kept -- up|down|status [FOLDER]`

use std::path::PathBuf;
use std::process::ExitCode;

use sqlstreams_dev::{Persistent, Result};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let verb = arguments.next().unwrap_or_default();
    let folder = arguments.next().map(PathBuf::from);
    match run(&verb.to_string_lossy(), folder) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: &str, folder: Option<PathBuf>) -> Result<()> {
    let kept = Persistent::new(folder.as_deref())?.progress(&|line| eprintln!("{line}"));
    match verb {
        "up" => println!("{}", kept.up()?.url),
        "down" => match kept.down()? {
            Some(stopped) => println!("stopped; the data stays in {}", stopped.data_dir.display()),
            None => println!("nothing ran"),
        },
        _ => match kept.status()? {
            Some(info) => println!("{} (process {})", info.url, info.pid),
            None => println!("nothing runs"),
        },
    }
    Ok(())
}
