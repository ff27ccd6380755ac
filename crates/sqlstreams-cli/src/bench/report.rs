//! What the facts of every benchmark can tell, whatever was measured.

use serde::Serialize;

use super::spread::Bar as Times;
use super::versus::{Line, Verdict};

/// The facts of a benchmark.
pub(crate) trait Report: Serialize {
    /// As a person reads them.
    fn print(&self) -> anyhow::Result<()>;
    /// What was asked of it.
    fn verdicts(&self) -> Vec<Verdict>;
    /// What is worth a picture.
    fn charts(&self) -> Vec<Chart>;
}

/// Bars beside each other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    /// What the parts of a bar are; one that has no parts needs no word for it.
    pub(crate) parts: Vec<&'static str>,
    pub(crate) bars: Vec<Bar>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    pub(crate) name: String,
    /// As many as there are parts; they add up.
    pub(crate) values: Vec<f64>,
    /// A limit, or what it is to reach.
    pub(crate) mark: Option<f64>,
}

impl Bar {
    pub(crate) fn of(name: impl Into<String>, value: f64) -> Self {
        Self { name: name.into(), values: vec![value], mark: None }
    }

    pub(crate) fn marked(self, mark: f64) -> Self {
        Self { mark: Some(mark), ..self }
    }
}

impl Chart {
    /// Bars without parts.
    pub(crate) fn plain(title: impl Into<String>, unit: &'static str, bars: Vec<Bar>) -> Self {
        Self { title: title.into(), unit, parts: vec![""], bars }
    }

    /// The rates of lines; `marks` are numbers of lines and the share of another's rate that is asked of them.
    pub(crate) fn rates(title: &str, lines: &[Line], marks: &[(usize, usize, f64)]) -> Self {
        let bars = lines.iter().enumerate().map(|(number, line)| {
            let mark = marks.iter().find(|(one, ..)| *one == number);
            let mark = mark.map(|(_, limit, share)| lines[*limit].per_second * share);
            Bar { mark, ..Bar::of(&line.name, line.per_second) }
        });
        Self::plain(title, "messages/s", bars.collect())
    }

    /// What a message costs of the processors; nothing where that is not known.
    pub(crate) fn processors(title: &str, lines: &[Line]) -> Option<Self> {
        let bars = lines.iter().map(|line| {
            let micros = |cpu: Option<f64>| Some(line.cost.per_message(cpu? * 1e6));
            let (server, client) = (micros(line.cost.server_cpu)?, micros(line.cost.client_cpu)?);
            Some(Bar { name: line.name.clone(), values: vec![server, client], mark: None })
        });
        let bars = bars.collect::<Option<Vec<Bar>>>()?;
        Some(Self {
            title: title.into(),
            unit: "µs/message",
            parts: vec!["server", "client"],
            bars,
        })
    }

    /// Both of them.
    pub(crate) fn of_lines(what: &str, lines: &[Line], marks: &[(usize, usize, f64)]) -> Vec<Self> {
        let rates = Self::rates(&format!("{what}: rates"), lines, marks);
        let processors = Self::processors(&format!("{what}: processor time"), lines);
        [Some(rates), processors].into_iter().flatten().collect()
    }

    /// How often it took how long.
    pub(crate) fn histogram(title: &str, bars: &[Times]) -> Self {
        let name = |bar: &Times| match bar.up_to {
            Some(ms) => format!("≤ {ms} ms"),
            None => "longer".to_owned(),
        };
        let bars = bars.iter().map(|bar| Bar::of(name(bar), bar.count as f64));
        Self::plain(title, "messages", bars.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::versus::Cost;

    fn line(name: &str, rate: f64, server_cpu: Option<f64>) -> Line {
        let cost = Cost { messages: 1_000, server_cpu, client_cpu: Some(0.001), ..Cost::default() };
        Line::new(name, vec![rate], cost, None)
    }

    #[test]
    fn a_mark_is_the_share_of_another() {
        let lines = [line("limit", 1_000.0, None), line("ours", 950.0, None)];
        let chart = Chart::rates("it", &lines, &[(1, 0, 0.9)]);
        assert_eq!(chart.bars[0], Bar::of("limit", 1_000.0));
        assert_eq!(chart.bars[1], Bar::of("ours", 950.0).marked(900.0));
    }

    #[test]
    fn processors_are_shown_where_they_are_known() {
        let known = [line("a", 1.0, Some(0.002))];
        let chart = Chart::processors("it", &known).unwrap();
        assert_eq!(chart.bars[0].values, [2.0, 1.0]);
        let unknown = [line("a", 1.0, Some(0.002)), line("b", 1.0, None)];
        assert_eq!(Chart::processors("it", &unknown), None);
        assert_eq!(Chart::of_lines("it", &unknown, &[]).len(), 1);
    }
}
