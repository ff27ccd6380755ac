//! A consumer in plain SQL, as any other language would write it: the protocol without the crate.

use std::collections::BTreeSet;

use sqlstreams::Client;
use tokio_postgres::Error;
use uuid::Uuid;

use crate::support::connect;

/// A connection that works for one group of one stream.
pub struct Plain {
    pub db: tokio_postgres::Client,
    pub stream: i64,
    pub group: i64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Lease {
    pub seq: i64,
    pub token: Uuid,
    /// As PostgreSQL writes it: `{[1,5),[7,9)}`.
    pub pending: String,
}

/// What becomes of a message: its id, `ok`, `retry`, `dead` or `delay`, and the seconds until the next attempt (NULL: the
/// group's backoff).
pub type Verdict = (i64, &'static str, Option<f64>);

/// Installs the schema, makes stream 1 with group `g`, and returns a consumer of it.
pub async fn installed(url: &str) -> Plain {
    Client::connect(url).await.unwrap();
    let db = connect(url).await;
    let stream = db.query_one("SELECT sqlstreams.create_stream('s')", &[]).await.unwrap().get(0);
    let group = create_group(&db, stream, "g").await;
    Plain { db, stream, group }
}

pub async fn create_group(db: &tokio_postgres::Client, stream: i64, name: &str) -> i64 {
    db.query_one("SELECT sqlstreams.create_group($1, $2)", &[&stream, &name]).await.unwrap().get(0)
}

impl Plain {
    /// Another session for the same group.
    pub async fn again(&self, url: &str) -> Self {
        Self { db: connect(url).await, stream: self.stream, group: self.group }
    }

    pub fn log(&self) -> String {
        format!("sqlstreams.message_log_{}", self.stream)
    }

    pub fn leases(&self) -> String {
        format!("sqlstreams.consumer_lease_{}", self.stream)
    }

    pub fn exceptions(&self) -> String {
        format!("sqlstreams.exception_queue_{}", self.stream)
    }

    /// Produces `count` messages in one transaction; returns their ids.
    pub async fn produce(&self, count: i64) -> Vec<i64> {
        let sql = format!(
            "INSERT INTO {} (payload) SELECT to_json(n) FROM generate_series(1, $1::bigint) AS n RETURNING id",
            self.log()
        );
        self.db.query(&sql, &[&count]).await.unwrap().iter().map(|row| row.get(0)).collect()
    }

    /// Draws `count` ids that never come.
    pub async fn burn(&self, count: i64) {
        self.db.batch_execute("BEGIN").await.unwrap();
        self.produce(count).await;
        self.db.batch_execute("ROLLBACK").await.unwrap();
    }

    /// The whole of `advance`. `done` names leases with what of them is finished, `failed` what of which lease failed.
    pub async fn try_advance(
        &self,
        done: &[(&Lease, &str)],
        failed: &[(Uuid, Verdict)],
        limit: i64,
    ) -> Result<(Vec<Uuid>, Option<Lease>), Error> {
        let (seqs, tokens, sets) = columns(done);
        let failed_tokens: Vec<Uuid> = failed.iter().map(|f| f.0).collect();
        let verdicts: Vec<Verdict> = failed.iter().map(|f| f.1).collect();
        let (ids, outcomes, errors, delays) = verdict_columns(&verdicts);
        let row = self
            .db
            .query_one(
                "SELECT lost, seq, token, pending::text
                 FROM sqlstreams.advance($1, $2, $3, $4, $5::text[]::int8multirange[], $6, $7, $8, $9, $10, $11)",
                &[
                    &self.stream,
                    &self.group,
                    &seqs,
                    &tokens,
                    &sets,
                    &failed_tokens,
                    &ids,
                    &outcomes,
                    &errors,
                    &delays,
                    &limit,
                ],
            )
            .await?;
        let lease = row.get::<_, Option<i64>>(1).map(|seq| Lease {
            seq,
            token: row.get(2),
            pending: row.get(3),
        });
        Ok((row.get(0), lease))
    }

    pub async fn advance(&self, done: &[(&Lease, &str)], limit: i64) -> (Vec<Uuid>, Option<Lease>) {
        self.try_advance(done, &[], limit).await.unwrap()
    }

    /// Claims up to `limit` ids.
    pub async fn claim(&self, limit: i64) -> Option<Lease> {
        self.advance(&[], limit).await.1
    }

    /// The ids of the messages of a lease.
    pub async fn fetch(&self, lease: &Lease) -> Vec<i64> {
        self.try_fetch(lease.token).await.unwrap()
    }

    pub async fn try_fetch(&self, token: Uuid) -> Result<Vec<i64>, Error> {
        let rows = self
            .db
            .query(
                "SELECT id FROM sqlstreams.fetch($1, $2, $3, 0, 1000000, 1000000000, NULL::json)",
                &[&self.stream, &self.group, &token],
            )
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    pub async fn settle(&self, lease: &Lease, done: &str) -> bool {
        self.db
            .query_one(
                "SELECT sqlstreams.settle($1, $2, $3, $4, $5::text::int8multirange)",
                &[&self.stream, &self.group, &lease.seq, &lease.token, &done],
            )
            .await
            .unwrap()
            .get(0)
    }

    pub async fn fail(&self, lease: &Lease, failed: &[Verdict]) -> bool {
        let (ids, outcomes, errors, delays) = verdict_columns(failed);
        self.db
            .query_one(
                "SELECT sqlstreams.fail($1, $2, $3, $4, $5, $6, $7, $8)",
                &[
                    &self.stream,
                    &self.group,
                    &lease.seq,
                    &lease.token,
                    &ids,
                    &outcomes,
                    &errors,
                    &delays,
                ],
            )
            .await
            .unwrap()
            .get(0)
    }

    /// The seq each lease has afterwards, `None` for the lost.
    pub async fn extend(&self, leases: &[(&Lease, &str)]) -> Vec<Option<i64>> {
        let (seqs, tokens, sets) = columns(leases);
        let rows = self
            .db
            .query(
                "SELECT seq FROM sqlstreams.extend($1, $2, $3, $4, $5::text[]::int8multirange[])",
                &[&self.stream, &self.group, &seqs, &tokens, &sets],
            )
            .await
            .unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// The tokens that were lost before.
    pub async fn release(&self, leases: &[(&Lease, &str)]) -> Vec<Uuid> {
        let (seqs, tokens, sets) = columns(leases);
        self.db
            .query_one(
                "SELECT sqlstreams.release($1, $2, $3, $4, $5::text[]::int8multirange[])",
                &[&self.stream, &self.group, &seqs, &tokens, &sets],
            )
            .await
            .unwrap()
            .get(0)
    }

    /// Claims due exceptions under a new token: the token and the ids.
    pub async fn claim_exceptions(&self, limit: i64, suspect: bool) -> (Uuid, Vec<i64>) {
        let token = Uuid::new_v4();
        let rows = self
            .db
            .query(
                "SELECT id FROM sqlstreams.claim_exceptions($1, $2, $3, $4, $5, NULL, NULL::json)",
                &[&self.stream, &self.group, &token, &limit, &suspect],
            )
            .await
            .unwrap();
        (token, rows.iter().map(|row| row.get(0)).collect())
    }

    /// Settles exceptions claimed under one token; returns the ids that were lost.
    pub async fn settle_exceptions(&self, token: Uuid, verdicts: &[Verdict]) -> Vec<i64> {
        let tokens = vec![token; verdicts.len()];
        let (ids, outcomes, errors, delays) = verdict_columns(verdicts);
        self.db
            .query_one(
                "SELECT sqlstreams.settle_exceptions($1, $2, $3, $4, $5, $6, $7)",
                &[&self.stream, &self.group, &tokens, &ids, &outcomes, &errors, &delays],
            )
            .await
            .unwrap()
            .get(0)
    }

    pub async fn extend_exceptions(&self, token: Uuid, ids: &[i64]) -> Vec<i64> {
        self.exception_call("extend_exceptions", token, ids).await
    }

    pub async fn release_exceptions(&self, token: Uuid, ids: &[i64]) -> Vec<i64> {
        self.exception_call("release_exceptions", token, ids).await
    }

    async fn exception_call(&self, function: &str, token: Uuid, ids: &[i64]) -> Vec<i64> {
        let tokens = vec![token; ids.len()];
        self.db
            .query_one(
                &format!("SELECT sqlstreams.{function}($1, $2, $3, $4)"),
                &[&self.stream, &self.group, &tokens, &ids],
            )
            .await
            .unwrap()
            .get(0)
    }

    pub async fn redrive(&self, ids: &[i64]) -> Vec<i64> {
        self.dead_call("redrive", ids).await
    }

    pub async fn discard(&self, ids: &[i64]) -> Vec<i64> {
        self.dead_call("discard", ids).await
    }

    async fn dead_call(&self, function: &str, ids: &[i64]) -> Vec<i64> {
        self.db
            .query_one(
                &format!("SELECT sqlstreams.{function}($1, $2, $3)"),
                &[&self.stream, &self.group, &ids],
            )
            .await
            .unwrap()
            .get(0)
    }

    /// Lets every lease of the group run out.
    pub async fn expire_leases(&self) {
        let sql = format!(
            "UPDATE {} SET expires_at = clock_timestamp() - interval '1 second' WHERE group_id = $1 AND expires_at > clock_timestamp()",
            self.leases()
        );
        self.db.execute(&sql, &[&self.group]).await.unwrap();
    }

    /// Lets the leases of all claimed exceptions run out.
    pub async fn expire_exceptions(&self) {
        let sql = format!(
            "UPDATE {} SET lease_expires_at = clock_timestamp() - interval '1 second' WHERE group_id = $1 AND state = 'inflight'",
            self.exceptions()
        );
        self.db.execute(&sql, &[&self.group]).await.unwrap();
    }

    /// Lets the next claim look at a gap, however lately and slowly somebody looked: it is done only so often.
    pub async fn let_look(&self) {
        self.db.batch_execute("UPDATE sqlstreams.stream_fence SET looked_at = NULL").await.unwrap();
    }

    /// Makes every waiting exception due.
    pub async fn all_due(&self) {
        let sql = format!(
            "UPDATE {} SET due_at = clock_timestamp() WHERE group_id = $1 AND state = 'ready' AND due_at > clock_timestamp()",
            self.exceptions()
        );
        self.db.execute(&sql, &[&self.group]).await.unwrap();
    }

    pub async fn claimed(&self) -> i64 {
        let sql = format!(
            "SELECT claimed FROM sqlstreams.consumer_group_cursor_{} WHERE group_id = $1 ORDER BY generation DESC LIMIT 1",
            self.stream
        );
        self.db.query_one(&sql, &[&self.group]).await.unwrap().get(0)
    }

    /// Where the group and its messages stand, as text: equal means unchanged. How often the cursor's row was written and
    /// from where leases are looked for is left out: any call may tidy that.
    pub async fn state(&self) -> String {
        let sql = format!(
            "SELECT jsonb_build_array(
                 (SELECT jsonb_agg(jsonb_build_array(claimed, next_seq)) FROM sqlstreams.consumer_group_cursor_{0} AS c WHERE group_id = $1),
                 (SELECT jsonb_agg(to_jsonb(l) ORDER BY seq) FROM sqlstreams.consumer_lease_{0} AS l WHERE group_id = $1),
                 (SELECT jsonb_agg(to_jsonb(e) ORDER BY message_id) FROM sqlstreams.exception_queue_{0} AS e WHERE group_id = $1))::text",
            self.stream
        );
        self.db.query_one(&sql, &[&self.group]).await.unwrap().get(0)
    }

    /// One exception row as text: "state attempts delays losses redrives", or "gone".
    pub async fn exception(&self, id: i64) -> String {
        let sql = format!(
            "SELECT format('%s a%s d%s l%s r%s', state, attempts, delays, losses, redrives) FROM {} WHERE group_id = $1 AND message_id = $2",
            self.exceptions()
        );
        let rows = self.db.query(&sql, &[&self.group, &id]).await.unwrap();
        rows.first().map_or("gone".to_owned(), |row| row.get(0))
    }
}

/// The ids of `{[1,5),[7,9)}`.
pub fn ids_of(pending: &str) -> BTreeSet<i64> {
    let mut numbers = pending
        .split(|c: char| !c.is_ascii_digit() && c != '-')
        .filter(|part| !part.is_empty())
        .map(|part| part.parse::<i64>().unwrap());
    let mut ids = BTreeSet::new();
    while let (Some(lower), Some(upper)) = (numbers.next(), numbers.next()) {
        ids.extend(lower..upper);
    }
    ids
}

/// A multirange of these ids.
pub fn set_of<'a>(ids: impl IntoIterator<Item = &'a i64>) -> String {
    let ranges: Vec<String> = ids.into_iter().map(|id| format!("[{id},{id}]")).collect();
    format!("{{{}}}", ranges.join(","))
}

fn columns<'a>(leases: &[(&'a Lease, &'a str)]) -> (Vec<i64>, Vec<Uuid>, Vec<&'a str>) {
    (
        leases.iter().map(|l| l.0.seq).collect(),
        leases.iter().map(|l| l.0.token).collect(),
        leases.iter().map(|l| l.1).collect(),
    )
}

#[allow(clippy::type_complexity)]
fn verdict_columns(
    verdicts: &[Verdict],
) -> (Vec<i64>, Vec<&'static str>, Vec<Option<&'static str>>, Vec<Option<f64>>) {
    (
        verdicts.iter().map(|v| v.0).collect(),
        verdicts.iter().map(|v| v.1).collect(),
        verdicts.iter().map(|v| (v.1 != "ok" && v.1 != "delay").then_some("it failed")).collect(),
        verdicts.iter().map(|v| v.2).collect(),
    )
}
