//! The examples in the pages work.

use std::path::Path;
use std::process::Command;

use crate::support::Bench;

#[test]
fn the_shell_examples_of_the_pages_work() {
    let bench = Bench::new();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/check-docs");
    let ran = Command::new(script)
        .env("SQLSTREAMS", env!("CARGO_BIN_EXE_sqlstreams"))
        .env("DATABASE_URL", &bench.url)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{text}");
    assert!(String::from_utf8_lossy(&ran.stdout).lines().count() >= 7, "{ran:?}");
}
