//! What a run leaves behind in the tables, until vacuum comes.

use anyhow::Context as _;
use serde::Serialize;
use tokio_postgres::Client;

use crate::output::{print, print_table, table, thousands};

/// The tables that streams have of one kind, all together.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Family {
    pub(crate) tables: String,
    pub(crate) dead_rows: i64,
    pub(crate) live_rows: i64,
}

/// Those with dead rows, by the server's statistics, which are a second or more behind.
pub(crate) async fn families(db: &Client, schema: &str) -> anyhow::Result<Vec<Family>> {
    let sql = r"SELECT regexp_replace(relname, '(_next)?(_\d+)+$', ''),
                       sum(n_dead_tup)::bigint, sum(n_live_tup)::bigint
                FROM pg_stat_user_tables WHERE schemaname = $1
                GROUP BY 1 HAVING sum(n_dead_tup) > 0 ORDER BY 2 DESC, 1";
    let rows = db.query(sql, &[&schema]).await.context("could not look at the tables")?;
    let family = |row: &tokio_postgres::Row| Family {
        tables: row.get(0),
        dead_rows: row.get(1),
        live_rows: row.get(2),
    };
    Ok(rows.iter().map(family).collect())
}

pub(crate) fn print_families(families: &[Family]) -> anyhow::Result<()> {
    if families.is_empty() {
        return print("\nno dead rows");
    }
    let mut rows = table(&["dead rows, by kind of table", "#dead", "#live"]);
    for Family { tables, dead_rows, live_rows } in families {
        rows.add_row([tables.clone(), thousands(*dead_rows), thousands(*live_rows)]);
    }
    print("")?;
    print_table(&rows)
}
