//! Charts as SVG, drawn with the page's colours.

use std::fmt::Write as _;

use crate::bench::report::{Bar, Chart};
use crate::bench::versus::number;

/// Of the whole drawing.
const WIDTH: f64 = 760.0;
/// What is left for names, and for numbers behind the longest bar.
const NAMES: f64 = 210.0;
const NUMBERS: f64 = 110.0;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
/// As many parts as have colours.
const PARTS: usize = 3;

/// Text that is nothing but text, in HTML and in SVG, also between quotes.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// One drawing with its title, and a legend where bars have parts.
pub(super) fn figure(chart: &Chart) -> String {
    let most = chart.bars.iter().flat_map(|bar| [sum(bar), bar.mark.unwrap_or(0.0)]);
    let most = most.filter(|value| value.is_finite()).fold(0.0, f64::max);
    let scale = if most > 0.0 { (WIDTH - NAMES - NUMBERS) / most } else { 0.0 };
    let height = ROW * chart.bars.len() as f64 + 4.0;
    let mut svg = String::new();
    // Writing to a string does not fail.
    let _ = write!(
        svg,
        "<figure><figcaption>{}{}</figcaption>\n<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">\n",
        escape(&chart.title),
        legend(chart),
        escape(&spoken(chart))
    );
    for (row, bar) in chart.bars.iter().enumerate() {
        draw(&mut svg, bar, row as f64 * ROW + 2.0, scale, chart.unit);
    }
    svg.push_str("</svg></figure>\n");
    svg
}

fn draw(svg: &mut String, bar: &Bar, top: f64, scale: f64, unit: &str) {
    let (middle, name) = (top + ROW / 2.0, escape(&bar.name));
    let _ = writeln!(
        svg,
        "<text class=\"name\" x=\"{:.1}\" y=\"{middle:.1}\">{name}</text>",
        NAMES - 10.0
    );
    let mut left = NAMES;
    for (part, value) in bar.values.iter().enumerate() {
        let width = length(*value, scale);
        let (y, class) = (top + (ROW - BAR) / 2.0, part % PARTS);
        let _ = writeln!(
            svg,
            "<rect class=\"p{class}\" x=\"{left:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR}\"/>"
        );
        left += width;
    }
    let mut end = left;
    if let Some(mark) = bar.mark {
        let at = NAMES + length(mark, scale);
        let _ = writeln!(
            svg,
            "<line class=\"mark\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
            top + 1.0,
            top + ROW - 1.0
        );
        end = end.max(at);
    }
    let value = format!("{} {unit}", number(sum(bar)));
    let _ = writeln!(
        svg,
        "<text class=\"value\" x=\"{:.1}\" y=\"{middle:.1}\">{}</text>",
        end + 8.0,
        escape(value.trim_end())
    );
}

fn sum(bar: &Bar) -> f64 {
    bar.values.iter().sum()
}

fn length(value: f64, scale: f64) -> f64 {
    if value.is_finite() { (value * scale).max(0.0) } else { 0.0 }
}

fn legend(chart: &Chart) -> String {
    let mut legend = String::new();
    if chart.parts.len() > 1 {
        for (part, name) in chart.parts.iter().enumerate() {
            let class = part % PARTS;
            let _ = write!(legend, " <span class=\"key k{class}\">{}</span>", escape(name));
        }
    }
    if chart.bars.iter().any(|bar| bar.mark.is_some()) {
        legend.push_str(" <span class=\"key km\">target</span>");
    }
    legend
}

/// For those who do not see it.
fn spoken(chart: &Chart) -> String {
    let bars = chart.bars.iter().map(|bar| format!("{} {}", bar.name, number(sum(bar))));
    format!("{}: {} ({})", chart.title, bars.collect::<Vec<_>>().join(", "), chart.unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text() {
        assert_eq!(escape("<a b=\"c\">'&'"), "&lt;a b=&quot;c&quot;&gt;&#39;&amp;&#39;");
        let bars = vec![Bar::of("<script>", 1.0)];
        let svg = figure(&Chart::plain("a & b", "\"</svg>", bars));
        assert!(!svg.contains("<script>") && svg.contains("&lt;script&gt;"), "{svg}");
        assert!(svg.contains("a &amp; b") && svg.matches("</svg>").count() == 1, "{svg}");
    }

    #[test]
    fn the_longest_fits_and_marks_are_where_they_belong() {
        let bars = vec![Bar::of("a", 100.0).marked(50.0), Bar::of("b", 0.0)];
        let svg = figure(&Chart::plain("it", "things", bars));
        let room = WIDTH - NAMES - NUMBERS;
        assert!(svg.contains(&format!("width=\"{room:.1}\"")), "{svg}");
        assert!(svg.contains(&format!("x1=\"{:.1}\"", NAMES + room / 2.0)), "{svg}");
        assert!(svg.contains("100 things") && svg.contains(">target<"), "{svg}");
    }

    #[test]
    fn nothing_and_what_is_no_number_can_be_drawn() {
        for bars in [vec![], vec![Bar::of("a", f64::NAN)], vec![Bar::of("a", f64::INFINITY)]] {
            let svg = figure(&Chart::plain("it", "", bars));
            assert!(!svg.contains("=\"NaN\"") && !svg.contains("=\"inf\""), "{svg}");
        }
    }

    #[test]
    fn parts_are_stacked_and_explained() {
        let bar = Bar { name: "a".into(), values: vec![3.0, 1.0], mark: None };
        let parts = vec!["server", "client"];
        let chart = Chart { title: "it".into(), unit: "µs", parts, bars: vec![bar] };
        let svg = figure(&chart);
        let room = WIDTH - NAMES - NUMBERS;
        let second = format!("class=\"p1\" x=\"{:.1}\"", NAMES + room * 0.75);
        assert!(svg.contains(&second), "{svg}");
        assert!(svg.contains("k0\">server<") && svg.contains("k1\">client<"), "{svg}");
    }
}
