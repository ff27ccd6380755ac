//! What there is to install: the numbered migrations, and the functions of this version.
//!
//! **Versions and programs.** A program works with a schema of its own version, and with a newer one whose `oldest` is not above its
//! own: so old and new programs run side by side while they are exchanged. Every released change has a version of its own, also
//! one of functions alone: functions of one version are the same everywhere.

/// A step from one version to the next. A step that is interrupted is taken up again by whoever migrates next.
pub(crate) struct Migration {
    pub(crate) version: i32,
    pub(crate) name: &'static str,
    /// The oldest version of programs that can work with the schema from here on, and while it is brought here.
    pub(crate) oldest: i32,
    /// The tables of which there is one: a short transaction.
    pub(crate) catalog: &'static str,
    /// Makes the function `migrate_stream(bigint)`, which does what is to be done for one stream: a short transaction each. It may be
    /// called for a stream again.
    pub(crate) stream: Option<&'static str>,
    /// Removes functions that the new ones would not replace. In the transaction that makes those.
    pub(crate) functions: &'static str,
}

pub(crate) const MIGRATIONS: &[Migration] = &[
    Migration {
        version: 1,
        name: "catalog",
        oldest: 1,
        catalog: include_str!("../../sql/migrations/0001_catalog.sql"),
        stream: None,
        functions: "",
    },
    Migration {
        version: 2,
        name: "upkeep",
        oldest: 1,
        catalog: include_str!("../../sql/migrations/0002_upkeep.sql"),
        stream: Some(include_str!("../../sql/migrations/0002_upkeep_stream.sql")),
        functions: include_str!("../../sql/migrations/0002_upkeep_functions.sql"),
    },
];

/// In the order of their use: SQL-language functions and views are checked when they are made.
pub(crate) const FUNCTIONS: &[&str] = &[
    include_str!("../../sql/functions/checks.sql"),
    include_str!("../../sql/functions/ring.sql"),
    include_str!("../../sql/functions/partition.sql"),
    include_str!("../../sql/functions/stream.sql"),
    include_str!("../../sql/functions/group.sql"),
    include_str!("../../sql/functions/position.sql"),
    include_str!("../../sql/functions/fence.sql"),
    include_str!("../../sql/functions/cursor.sql"),
    include_str!("../../sql/functions/retry.sql"),
    include_str!("../../sql/functions/flow.sql"),
    include_str!("../../sql/functions/owner.sql"),
    include_str!("../../sql/functions/transaction.sql"),
    include_str!("../../sql/functions/lease.sql"),
    include_str!("../../sql/functions/lanes.sql"),
    include_str!("../../sql/functions/fair.sql"),
    include_str!("../../sql/functions/lanes_settle.sql"),
    include_str!("../../sql/functions/lanes_mode.sql"),
    include_str!("../../sql/functions/claim.sql"),
    include_str!("../../sql/functions/binding.sql"),
    include_str!("../../sql/functions/binding_set.sql"),
    include_str!("../../sql/functions/lanes_claim.sql"),
    include_str!("../../sql/functions/fetch.sql"),
    include_str!("../../sql/functions/settle.sql"),
    include_str!("../../sql/functions/exceptions.sql"),
    include_str!("../../sql/functions/watch.sql"),
    include_str!("../../sql/functions/dead.sql"),
    include_str!("../../sql/functions/seek.sql"),
    include_str!("../../sql/functions/replay.sql"),
    include_str!("../../sql/functions/payload.sql"),
    include_str!("../../sql/functions/commit.sql"),
    include_str!("../../sql/functions/views.sql"),
    include_str!("../../sql/functions/produce.sql"),
    include_str!("../../sql/functions/delayed.sql"),
    include_str!("../../sql/functions/current.sql"),
    include_str!("../../sql/functions/compact.sql"),
    include_str!("../../sql/functions/reclaim.sql"),
    include_str!("../../sql/functions/read.sql"),
    include_str!("../../sql/functions/import.sql"),
    include_str!("../../sql/functions/export.sql"),
    include_str!("../../sql/functions/shape.sql"),
    include_str!("../../sql/functions/doctor_shape.sql"),
    include_str!("../../sql/functions/doctor_stream.sql"),
    include_str!("../../sql/functions/doctor.sql"),
    include_str!("../../sql/functions/doctor_repair.sql"),
    include_str!("../../sql/functions/group_expiry.sql"),
    include_str!("../../sql/functions/schedule.sql"),
    include_str!("../../sql/functions/schedule_fire.sql"),
    include_str!("../../sql/functions/retention.sql"),
    include_str!("../../sql/functions/retention_leave.sql"),
    include_str!("../../sql/functions/retention_hold.sql"),
    include_str!("../../sql/functions/archive.sql"),
    include_str!("../../sql/functions/maintain.sql"),
    include_str!("../../sql/functions/generated.sql"),
    // The last: it notes what all of them have made.
    include_str!("../../sql/functions/installed.sql"),
];

pub(crate) fn version() -> i32 {
    MIGRATIONS.last().map_or(0, |m| m.version)
}

pub(crate) fn functions_checksum() -> String {
    checksum(FUNCTIONS)
}

/// FNV-1a: tells texts apart, and is no secret.
pub(crate) fn checksum(texts: &[&str]) -> String {
    let hash =
        texts.iter().flat_map(|t| t.bytes()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_up_without_holes() {
        for (i, m) in MIGRATIONS.iter().enumerate() {
            assert_eq!(m.version, i as i32 + 1, "{}", m.name);
            assert!((1..=m.version).contains(&m.oldest), "{}", m.name);
        }
    }
}
