//! The page that `--html` writes: one file, with nothing from elsewhere.

use std::fmt::Write as _;

use super::svg::{escape, figure};
use super::{Section, Target, words};
use crate::bench::versus::{Verdict, number};

const STYLE: &str = "\
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5b6675; --ground: #ffffff; --line: #d9dee5;
  --a: #2f6fb3; --b: #d9822b; --c: #5a9e6f; --mark: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa6b5; --ground: #14181d; --line: #333c47;
    --a: #6aa5e3; --b: #e9a456; --c: #7fc495; --mark: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
p, figcaption, .took { color: var(--soft); }
code { font: 0.9em ui-monospace, monospace; color: var(--ink); overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--line); }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.missed { color: var(--b); } .gross { color: var(--mark); font-weight: bold; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font-size: 12px; dominant-baseline: middle; }
svg .name { text-anchor: end; } svg .value { fill: var(--soft); }
.p0 { fill: var(--a); } .p1 { fill: var(--b); } .p2 { fill: var(--c); }
.mark { stroke: var(--mark); stroke-width: 2; }
.key::before { content: '■ '; margin-left: 0.8rem; }
.k0::before { color: var(--a); } .k1::before { color: var(--b); } .k2::before { color: var(--c); }
.km::before { content: '| '; color: var(--mark); font-weight: bold; }
details pre { overflow-x: auto; font-size: 0.8rem; }";

/// The whole page.
pub(super) fn page(sections: &[Section], targets: &[Target]) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>SQLStreams: benchmarks</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n\
         <h1>SQLStreams {}: benchmarks</h1>\n<p>{}</p>\n",
        env!("CARGO_PKG_VERSION"),
        escape(&server(sections))
    );
    page.push_str(&table(targets));
    for section in sections {
        page.push_str(&chapter(section));
    }
    page.push_str("</body>\n</html>\n");
    page
}

/// What they ran on, as the first of them knows it.
fn server(sections: &[Section]) -> String {
    let word = |name: &str| {
        let server = sections.first().map(|section| &section.facts["postgresql"][name]);
        server.and_then(|word| word.as_str()).unwrap_or("?").to_owned()
    };
    format!(
        "PostgreSQL {}, fsync {}, synchronous_commit {}",
        word("version"),
        word("fsync"),
        word("synchronous_commit")
    )
}

fn table(targets: &[Target]) -> String {
    let mut rows = String::from(
        "<table>\n<tr><th>bench</th><th>what</th><th class=\"n\">measured</th><th class=\"n\">target</th><th></th></tr>\n",
    );
    for target in targets {
        let (word, sign) = words(target);
        let class = match (target.verdict.met, target.gross) {
            (true, _) => "met",
            (false, false) => "missed",
            (false, true) => "gross",
        };
        let Verdict { what, measured, target: limit, .. } = &target.verdict;
        // Writing to a string does not fail.
        let _ = writeln!(
            rows,
            "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{sign} {}</td><td class=\"{class}\">{word}</td></tr>",
            escape(&target.bench),
            escape(what),
            number(*measured),
            number(*limit)
        );
    }
    rows + "</table>\n"
}

fn chapter(section: &Section) -> String {
    let mut chapter = format!(
        "<h2>{}</h2>\n<p><code>{}</code> <span class=\"took\">took {:.0} s</span></p>\n",
        escape(&section.name),
        escape(&section.command),
        section.seconds
    );
    chapter.extend(section.charts.iter().map(figure));
    let facts = escape(&format!("{:#}", section.facts));
    let _ = writeln!(
        chapter,
        "<details><summary>All that was measured</summary><pre>{facts}</pre></details>"
    );
    chapter
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::bench::report::{Bar, Chart};
    use crate::bench::versus::Kind;

    fn section() -> Section {
        Section {
            name: "it".to_owned(),
            command: "sqlstreams bench it --name '<b>'".to_owned(),
            seconds: 1.6,
            facts: json!({"postgresql": {"version": "17.2", "fsync": "on"}, "name": "</pre><b>"}),
            verdicts: vec![
                Verdict::new("a / b", Kind::Ratio, 0.95, 0.9),
                Verdict::new("c < d", Kind::Ratio, 0.6, 0.9),
                Verdict::new("lost", Kind::Count, 1.0, 0.0),
            ],
            charts: vec![Chart::plain("rates", "messages/s", vec![Bar::of("a", 1.0)])],
        }
    }

    #[test]
    fn the_page_holds_everything_and_nothing_from_elsewhere() {
        let sections = [section()];
        let page = page(&sections, &super::super::targets(&sections));
        for words in [
            "PostgreSQL 17.2, fsync on, synchronous_commit ?",
            "<td class=\"n\">0.95</td><td class=\"n\">≥ 0.90</td><td class=\"met\">met</td>",
            "<td class=\"missed\">missed</td>",
            "<td class=\"gross\">MISSED GROSSLY</td>",
            "took 2 s",
            "<svg ",
            "prefers-color-scheme: dark",
        ] {
            assert!(page.contains(words), "{words:?} is not in: {page}");
        }
        for foreign in ["http", "<script", "<link", "url(", "@import", "src="] {
            assert!(!page.contains(foreign), "{foreign:?} is in: {page}");
        }
    }

    #[test]
    fn what_was_measured_cannot_break_out() {
        let sections = [section()];
        let page = page(&sections, &super::super::targets(&sections));
        assert!(!page.contains("<b>") && page.contains("c &lt; d"), "{page}");
        assert_eq!(page.matches("</pre>").count(), 1);
    }
}
