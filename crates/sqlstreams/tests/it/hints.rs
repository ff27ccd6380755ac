//! What errors tell to do next is right for everybody: for whoever calls from SQL, from Rust and from the shell. So it names no arguments or functions of one
//! of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// All files of that kind below a folder.
fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
}

fn texts(folder: &str, extension: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), extension, &mut found);
    assert!(!found.is_empty());
    found.into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// What stands in quotes in the statement that a text begins with; two quotes in a row are one.
fn quoted(text: &str, quote: char, end: char) -> Vec<String> {
    let (mut literals, mut open) = (Vec::new(), None::<String>);
    for character in text.chars() {
        match &mut open {
            Some(literal) if character == quote => {
                literals.push(std::mem::take(literal));
                open = None;
            }
            Some(literal) => literal.push(character),
            None if character == quote => open = Some(String::new()),
            None if character == end => break,
            None => {}
        }
    }
    literals
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

#[test]
fn hints_name_no_arguments_and_functions() {
    let sql = texts("sql/functions", "sql");
    let made = sql.iter().flat_map(|(_, text)| text.split("CREATE OR REPLACE FUNCTION ").skip(1));
    let functions: BTreeSet<&str> =
        made.filter_map(|text| text.split('(').next()).filter(|name| name.contains('_')).collect();
    assert!(functions.contains("create_stream"), "{functions:?}");
    let mut hints = Vec::new();
    for (path, text) in &sql {
        for said in ["HINT =", "require_that(", "refuse_binding("] {
            for (at, _) in text.match_indices(said) {
                let literals = quoted(&text[at + said.len()..], '\'', ';');
                hints.extend(literals.into_iter().map(|literal| (path, literal)));
            }
        }
    }
    let rust = texts("src", "rs");
    for (path, text) in &rust {
        for (at, said) in text.match_indices("with_hint(") {
            let literals = quoted(&text[at + said.len()..], '"', ';');
            hints.extend(literals.into_iter().take(1).map(|literal| (path, literal)));
        }
    }
    assert!(hints.len() > 100, "only {} were found", hints.len());
    let named = |hint: &str| {
        hint.contains("()")
            || hint.contains("=>")
            || words(hint).any(|word| word.starts_with("p_") || functions.contains(word))
    };
    let wrong: Vec<_> = hints.iter().filter(|(_, hint)| named(hint)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
