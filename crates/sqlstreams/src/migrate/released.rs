//! What was released stays as it was: programs of that version are out there, and meet what later versions made of their schema.
//!
//! `tests/released/N` holds what version N installed, and the statements that its programs send. Upgrades are tested from there
//! (tests/it/upgrade.rs). To release a version, run this module's test with SQLSTREAMS_RELEASE set, which writes them.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::list::{FUNCTIONS, MIGRATIONS, functions_checksum, version};
use crate::payload::PayloadType;
use crate::queries::{Queries, Query, StreamQueries};
use crate::schema::Schema;

/// A fresh installation, in a schema that exists and is the search path.
fn installation() -> String {
    let mut text = include_str!("../../sql/migrations/schema_migration.sql").to_owned();
    for migration in MIGRATIONS {
        writeln!(text, "{}", migration.catalog).unwrap();
        writeln!(
            text,
            "INSERT INTO schema_migration (version, oldest, name, checksum, functions, finished_at) VALUES ({}, {}, '{}', '', '{}', now());",
            migration.version, migration.oldest, migration.name, functions_checksum()
        )
        .unwrap();
    }
    for functions in FUNCTIONS {
        writeln!(text, "{functions}").unwrap();
    }
    text
}

/// Each statement as PREPARE, those of a stream for stream 1 with JSON payloads.
fn statements() -> String {
    let schema = Schema::new("sqlstreams").unwrap();
    let (queries, of_stream) =
        (Queries::new(&schema), StreamQueries::new(&schema, 1, PayloadType::Json));
    let all: Vec<(&str, &Query)> = queries.all().into_iter().chain(of_stream.all()).collect();
    let mut text = String::new();
    for (name, query) in all {
        let mut types: Vec<String> = query.types.iter().map(ToString::to_string).collect();
        if matches!(name, "insert" | "produce") {
            types.push("_json".into());
        }
        let types =
            if types.is_empty() { String::new() } else { format!(" ({})", types.join(", ")) };
        writeln!(text, "PREPARE \"{name}\"{types} AS\n{};\n", query.sql.trim_end()).unwrap();
    }
    text
}

#[test]
fn what_was_released_is_what_it_was() {
    let folder = format!("{}/tests/released/{}", env!("CARGO_MANIFEST_DIR"), version());
    let folder = PathBuf::from(folder);
    if std::env::var_os("SQLSTREAMS_RELEASE").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("installation.sql"), installation()).unwrap();
        std::fs::write(folder.join("statements.sql"), statements()).unwrap();
    }
    if !folder.exists() {
        // Not released yet.
        return;
    }
    for (file, now) in [("installation.sql", installation()), ("statements.sql", statements())] {
        let released = std::fs::read_to_string(folder.join(file)).unwrap();
        assert!(
            released == now,
            "{file} of version {} differs from what was released: add a migration, be it one of functions alone",
            version()
        );
    }
}
