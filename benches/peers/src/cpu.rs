//! CPU time of processes, from /proc.

use std::collections::HashMap;
use std::fs;

use anyhow::{Context as _, Result};

/// Seconds that these processes and all that they started have used so far, in user mode and in the system.
///
/// Children that have ended count once their parent has taken note of it.
pub(crate) fn seconds(roots: &[u32]) -> Result<f64> {
    let mut parents = HashMap::<u32, Vec<u32>>::new();
    let mut ticks = HashMap::<u32, u64>::new();
    for entry in fs::read_dir("/proc").context("could not read /proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // It may have ended meanwhile.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let Some((parent, used)) = parse(&stat) else { continue };
        parents.entry(parent).or_default().push(pid);
        ticks.insert(pid, used);
    }
    let mut sum = 0;
    let mut left = roots.to_vec();
    while let Some(pid) = left.pop() {
        sum += ticks.get(&pid).copied().unwrap_or(0);
        left.extend(parents.remove(&pid).unwrap_or_default());
    }
    Ok(sum as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Seconds that this process alone has used, without what it started.
pub(crate) fn own_seconds() -> Result<f64> {
    let stat = fs::read_to_string("/proc/self/stat").context("could not read /proc/self/stat")?;
    let used = fields(&stat).and_then(|fields| Some(field(&fields, 11)? + field(&fields, 12)?));
    let used = used.context("could not understand /proc/self/stat")?;
    Ok(used as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The parent, and the ticks of a process and its children that have ended.
fn parse(stat: &str) -> Option<(u32, u64)> {
    let fields = fields(stat)?;
    let parent = fields.get(1)?.parse().ok()?;
    let used = (11..=14).map(|place| field(&fields, place)).sum::<Option<u64>>()?;
    Some((parent, used))
}

/// What follows the program's name, which stands in parentheses and may hold anything.
fn fields(stat: &str) -> Option<Vec<&str>> {
    Some(stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect())
}

fn field(fields: &[&str], place: usize) -> Option<u64> {
    fields.get(place)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_line_of_proc() {
        let line = "71 (a) b) c) S 12 71 71 0 -1 4194560 9 9 0 0 10 20 3 4 20 0 1 0 77 1 1";
        assert_eq!(parse(line), Some((12, 37)));
        assert_eq!(parse("nothing"), None);
    }

    #[test]
    fn counts_work_that_is_done() {
        let before = own_seconds().unwrap();
        let mut n = 1_u64;
        while own_seconds().unwrap() < before + 0.05 {
            n = std::hint::black_box(n.wrapping_mul(3));
        }
        assert!(seconds(&[std::process::id()]).unwrap() >= before + 0.05);
    }
}
