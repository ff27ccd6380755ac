//! Finding server programs.

use sqlstreams_dev::{Error, PG_BIN_VARIABLE, Programs};

use crate::support::{in_own_process, open_folder, script};

#[test]
fn finds_some_here() {
    let programs = Programs::find_or_obtain(None, &|_| {}).expect("this machine has some");
    assert!(programs.tool("initdb").is_some());
    assert!(programs.tool("no-such-tool").is_none());
    assert_eq!(Programs::in_folder(programs.folder()).expect("they still do"), programs);
    assert!(programs.version().starts_with(&programs.major().to_string()));
}

#[test]
fn says_what_a_given_folder_lacks() {
    let folder = open_folder();
    let why = || {
        let error = Programs::in_folder(folder.path()).expect_err("it doesn't qualify");
        assert!(matches!(error, Error::UnusableFolder { .. }));
        let text = error.to_string();
        assert!(text.contains(&folder.path().display().to_string()), "{text}");
        text
    };
    assert!(why().contains("no program `initdb`"), "{}", why());

    script(folder.path(), "initdb", "exit 0");
    assert!(why().contains("no program `postgres`"), "{}", why());

    script(folder.path(), "postgres", "echo 'postgres (PostgreSQL) 14.9'");
    assert!(why().contains("PostgreSQL 14.9, not 15 to 18"), "{}", why());

    script(folder.path(), "postgres", "echo 'postgres (PostgreSQL) 19devel'");
    assert!(why().contains("PostgreSQL 19devel"), "{}", why());

    script(folder.path(), "postgres", "echo hello");
    assert!(why().contains("says `hello`"), "{}", why());

    script(folder.path(), "postgres", "echo 'missing library' >&2; exit 127");
    assert!(why().contains("missing library"), "{}", why());

    script(folder.path(), "postgres", "echo 'postgres (PostgreSQL) 16.2'");
    let programs = Programs::in_folder(folder.path()).expect("it qualifies");
    assert_eq!((programs.major(), programs.version()), (16, "16.2"));
}

#[test]
fn says_that_a_given_folder_does_not_exist() {
    let error = Programs::in_folder("/no/such/folder").expect_err("it isn't there");
    assert!(error.to_string().contains("no such folder"), "{error}");
}

#[test]
fn a_wrong_folder_in_the_environment_is_no_reason_to_look_on() {
    let output = in_own_process("find::report", &[(PG_BIN_VARIABLE, "/no/such/folder")])
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("/no/such/folder can't be used"), "{text}");
    assert!(text.contains("set by SQLSTREAMS_PG_BIN"), "{text}");
}

#[test]
fn the_folder_in_the_environment_comes_first() {
    let folder = open_folder();
    script(folder.path(), "initdb", "exit 0");
    script(folder.path(), "postgres", "echo 'postgres (PostgreSQL) 16.99'");
    let path = folder.path().to_str().expect("it's plain text");
    let output =
        in_own_process("find::report", &[(PG_BIN_VARIABLE, path)]).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("found 16.99"), "{text}");
}

#[test]
#[ignore = "run by the tests above in a process of its own"]
fn report() {
    match Programs::find(None) {
        Ok(programs) => println!("found {}", programs.version()),
        Err(error) => println!("{error}"),
    }
}
