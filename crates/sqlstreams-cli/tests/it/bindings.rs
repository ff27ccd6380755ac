//! `group bindings`, and creating groups with them.

use serde_json::{Value, json};

use crate::support::Bench;

#[test]
fn bindings_are_listed_changed_and_explained() {
    let bench = Bench::with_orders("1\n2\n");
    bench.ok(&["group", "create", "orders", "all"]);
    let args = ["group", "create", "orders", "g", "--bind", "orders.*.created"];
    bench.ok(&[&args[..], &["--bind", r#"{"headers": {"region": "eu"}}"#]].concat());
    let list = ["group", "bindings", "orders", "g"];
    let pattern = |pattern: &str| json!({"pattern": pattern, "headers": null});
    let eu = json!({"pattern": null, "headers": {"region": "eu"}});
    assert_eq!(
        bench.json(&list),
        json!({"stream": "orders", "group": "g", "bindings": [eu, pattern("orders.*.created")]})
    );
    let shown = bench.ok(&list);
    assert!(shown.contains("PATTERN") && shown.contains(r#"{"region":"eu"}"#), "{shown}");
    assert!(bench.ok(&["group", "show", "orders", "g"]).contains("bindings 2"));
    assert!(bench.ok(&["group", "bindings", "orders", "all"]).contains("receives everything"));

    let change = |how: &str, bindings: &[&str]| -> Value {
        bench.json(&[&["group", "bindings", how, "orders", "g"], bindings].concat())
    };
    let added = change("add", &["refunds.#"]);
    assert_eq!((&added["changed"], &added["after_id"]), (&true.into(), &0.into()));
    assert_eq!(added["bindings"].as_array().unwrap().len(), 3);
    assert_eq!(change("add", &["refunds.#.#"])["changed"], false);
    assert_eq!(change("remove", &["none.of.them"])["changed"], false);
    assert_eq!(change("remove", &["refunds.#"])["changed"], true);
    assert_eq!(change("set", &["a.#", "b"])["bindings"], json!([pattern("a.#"), pattern("b")]));
    let text = bench.ok(&["group", "bindings", "set", "orders", "g", "a.#"]);
    assert!(
        text.contains("group \"g\" of stream \"orders\" has 1 binding, for ids above 0"),
        "{text}"
    );

    let test =
        |args: &[&str]| bench.json(&[&["group", "bindings", "test", "orders"], args].concat());
    let all = json!({"group": "all", "binding": null});
    assert_eq!(test(&[]), json!([all]));
    assert_eq!(
        test(&["--routing-key", "a.b", "--headers", r#"{"x": 1}"#]),
        json!([all, {"group": "g", "binding": pattern("a.#")}])
    );
    let text = bench.ok(&["group", "bindings", "test", "orders", "--routing-key", "a"]);
    assert!(text.contains("GROUP") && text.contains("a.#"), "{text}");

    let history = bench.json(&["group", "bindings", "history", "orders", "g"]);
    let history = history.as_array().unwrap();
    assert_eq!(history.len(), 5);
    assert_eq!(
        (&history[4]["version"], &history[4]["changed_by"]),
        (&5.into(), &"postgres".into())
    );
    assert_eq!(history[4]["bindings"], json!([pattern("a.#")]));
    let text = bench.ok(&["group", "bindings", "history", "orders", "g"]);
    assert!(
        text.contains("AFTER") && text.contains("postgres") && text.contains("a.#  b"),
        "{text}"
    );

    assert!(
        bench.ok(&["group", "bindings", "set", "orders", "g", "--none"]).contains("everything")
    );
    assert_eq!(bench.json(&list)["bindings"], json!([]));
}

#[test]
fn what_is_no_binding_is_refused() {
    let bench = Bench::with_orders("");
    bench.ok(&["group", "create", "orders", "g", "--bind", "a"]);
    let change =
        |how: &str, binding: &str| bench.run(&["group", "bindings", how, "orders", "g", binding]);
    change("set", "a..b").assert_error(2, &["'a..b' has an empty word", "single dots"]);
    change("add", "a.b*").assert_error(2, &["wildcard within the word 'b*'"]);
    change("add", "{}").assert_error(2, &["says nothing"]);
    change("add", r#"{"header": {}}"#).assert_error(2, &["not \"header\""]);
    change("add", "{").assert_error(2, &["not a JSON object"]);
    change("remove", "a").assert_error(2, &["only binding", "none"]);
    bench.run(&["group", "bindings", "set", "orders", "g"]).assert_error(2, &["BINDING"]);
    bench
        .run(&["group", "bindings", "set", "orders", "none", "a"])
        .assert_error(3, &["no group \"none\""]);
    bench.run(&["group", "bindings", "orders"]).assert_error(2, &["GROUP"]);
    let long = "a".repeat(256);
    bench
        .run(&["group", "bindings", "test", "orders", "--routing-key", &long])
        .assert_error(2, &["256 bytes"]);
    bench
        .run(&["group", "bindings", "test", "orders", "--headers", "[1]"])
        .assert_error(2, &["not a JSON object"]);
    bench.run(&["group", "create", "orders", "h", "--bind", "*a"]).assert_error(2, &["wildcard"]);
    bench.run(&["group", "bindings", "orders", "h"]).assert_error(3, &["no group \"h\""]);
    let refused = change("set", "a..b");
    assert_eq!(refused.code, 2);
}
