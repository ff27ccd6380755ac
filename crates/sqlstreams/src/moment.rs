//! Times as PostgreSQL stores them, with its two infinities.

use std::error::Error as StdError;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

/// 2000-01-01, from which PostgreSQL counts microseconds, as an i64 whose ends are its infinities.
const EPOCH: Duration = Duration::from_secs(946_684_800);

/// A time for a statement. The driver makes one of each time that it reads, of the infinities as well, and would panic if it had to write the lower
/// of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment(pub(crate) SystemTime);

impl Moment {
    /// What is beyond the infinities is one of them.
    fn micros(self) -> i64 {
        match self.0.duration_since(SystemTime::UNIX_EPOCH + EPOCH) {
            Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |us| -us),
        }
    }
}

impl ToSql for Moment {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn StdError + Sync + Send>> {
        out.extend_from_slice(&self.micros().to_be_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }

    to_sql_checked!();
}

#[cfg(test)]
mod tests {
    use tokio_postgres::types::FromSql;

    use super::*;

    #[test]
    fn every_time_that_is_read_can_be_written() {
        for micros in [i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX - 1, i64::MAX] {
            let read = SystemTime::from_sql(&Type::TIMESTAMPTZ, &micros.to_be_bytes()).unwrap();
            assert_eq!(Moment(read).micros(), micros);
        }
        let beyond = Duration::from_secs(1 << 50);
        assert_eq!(Moment(SystemTime::UNIX_EPOCH + beyond).micros(), i64::MAX);
        assert_eq!(Moment(SystemTime::UNIX_EPOCH - beyond).micros(), i64::MIN);
    }
}
