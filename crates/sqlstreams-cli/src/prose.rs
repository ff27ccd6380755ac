//! The texts below the options of a command's help.
//!
//! In the source their lines are as long as fits there. Clap breaks lines where the terminal ends, which of lines that are
//! broken already makes a long one and a short one in turn.

/// Joins the lines of each paragraph, and of each entry of a list: those that are set in deeper than its first.
pub(crate) fn join_lines(text: &str) -> String {
    let mut paragraphs: Vec<String> = Vec::new();
    for line in text.lines() {
        match paragraphs.last_mut() {
            Some(paragraph) if goes_on(paragraph, line) => {
                paragraph.push(' ');
                paragraph.push_str(line.trim_start());
            }
            _ => paragraphs.push(line.to_owned()),
        }
    }
    paragraphs.join("\n")
}

fn goes_on(paragraph: &str, line: &str) -> bool {
    match (indent(paragraph), indent(line)) {
        _ if paragraph.is_empty() || line.is_empty() => false,
        (0, 0) => true,
        (entry, deeper) => entry > 0 && deeper > entry,
    }
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_examples_keep_their_lines() {
        let text = "One\ntwo.\n\nThree:\n  - four\n    five\n  six  6\n       7\nSeven\neight\n\nExamples:\n  a\n  b";
        let joined =
            "One two.\n\nThree:\n  - four five\n  six  6 7\nSeven eight\n\nExamples:\n  a\n  b";
        assert_eq!(join_lines(text), joined);
    }
}
