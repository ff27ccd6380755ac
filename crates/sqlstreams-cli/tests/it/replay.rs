//! `group seek` and `group replay`.

use serde_json::json;

use crate::support::Bench;

fn consume(bench: &Bench) -> usize {
    bench.ok(&["consume", "orders", "-g", "g", "--until-caught-up"]).lines().count()
}

fn seek<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&["group", "seek", "orders", "g"], args].concat()
}

fn replay<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&["group", "replay"], args].concat()
}

fn range<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&["group", "replay", "orders", "g"], args].concat()
}

#[test]
fn a_group_is_moved_when_that_is_confirmed() {
    let bench = Bench::with_orders("1\n2\n3\n4\n");
    assert_eq!(consume(&bench), 4);
    bench.run(&seek(&["3"])).assert_error(2, &["to after id 2", "up to 2 messages again", "--yes"]);
    let text = bench.ok(&seek(&["3", "--preview"]));
    assert!(
        text.contains("would move group \"g\"") && text.contains("up to 2 messages again"),
        "{text}"
    );
    let preview = bench.json(&seek(&["3", "--preview"]));
    assert_eq!((&preview["moved"], &preview["after"]), (&json!(false), &json!(2)));
    assert_eq!(bench.json(&["group", "show", "orders", "g"])["claimed"], 4);
    let moved = bench.json(&seek(&["3", "--yes"]));
    assert_eq!(
        (&moved["moved"], &moved["before"], &moved["repeated"]),
        (&json!(true), &json!(4), &json!(2))
    );
    assert_eq!(consume(&bench), 2);
    bench.ok(&seek(&["beginning", "--yes", "--repeat-dead"]));
    let text = bench.ok(&seek(&["latest", "--yes", "--drop-unfinished"]));
    assert!(text.contains("up to 4 messages skipped"), "{text}");
    assert_eq!(consume(&bench), 0);
    bench.ok(&seek(&["1d ago", "--yes"]));
    assert_eq!(consume(&bench), 4);
    bench.run(&seek(&["99", "--yes"])).assert_error(2, &["cannot go to id 99"]);
    bench.run(&seek(&["yesterday"])).assert_error(2, &["write beginning, latest"]);
}

#[test]
fn a_range_is_replayed_listed_and_cancelled() {
    let bench = Bench::with_orders("1\n2\n3\n4\n");
    bench.ok(&["group", "create", "orders", "g"]);
    assert!(bench.ok(&range(&[])).contains("has claimed nothing of that range"));
    assert_eq!(consume(&bench), 4);
    assert!(bench.ok(&range(&["--from", "1d ago", "--preview"])).contains("would be ids 1 to 4"));
    assert!(bench.ok(&replay(&["list", "orders", "g"])).contains("no replays"));
    let text = bench.ok(&range(&["--from", "2", "--upto", "3"]));
    assert!(text.contains("ids 2 to 3 once more"), "{text}");
    assert!(bench.ok(&["group", "show", "orders", "g"]).contains("replays  2 ids to go"));
    assert_eq!(consume(&bench), 2);
    let second = bench.json(&range(&["--bind", "a.#"]));
    assert_eq!((&second["from"], &second["upto"]), (&json!(1), &json!(4)));
    let number = second["replay"].to_string();
    let text = bench.ok(&replay(&["list", "orders", "g"]));
    for word in ["REPLAY", "running", "over", "a.#"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(bench.ok(&replay(&["cancel", "orders", "g", &number])).contains("gave up 4 ids"));
    assert_eq!(bench.json(&replay(&["cancel", "orders", "g", "--all"]))["given_up"], 0);
    let listed = bench.json(&replay(&["list", "orders", "g"]));
    assert_eq!((&listed[0]["cancelled"], &listed[1]["waiting"]), (&json!(true), &json!(0)));
    bench.run(&replay(&["cancel", "orders", "g"])).assert_error(2, &["<REPLAY>"]);
    bench.run(&range(&["--from", "3", "--upto", "2"])).assert_error(2, &["ends before it begins"]);
    bench.run(&range(&["--from", "latest"])).assert_error(2, &["cannot begin"]);
    bench.ok(&["group", "create", "orders", "o", "--mode", "ordered"]);
    bench.run(&["group", "replay", "orders", "o"]).assert_error(1, &["is ordered", "seek"]);
}
