//! The SQL texts that the crate sends, rendered for one schema.
//!
//! They are sent as unnamed one-message statements, which every pooler lets through, with their parameter types spelled
//! out here once.

use tokio_postgres::types::Type;

use crate::payload::PayloadType;
use crate::schema::Schema;

/// A statement and the types of its parameters.
#[derive(Debug, Clone)]
pub(crate) struct Query {
    pub(crate) sql: String,
    pub(crate) types: &'static [Type],
}

macro_rules! queries {
    ($(#[$doc:meta])* $name:ident { $($query:ident: [$($type:ident),*],)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) struct $name { $(pub(crate) $query: Query,)* }

        impl $name {
            fn render(render: impl Fn(&str) -> String) -> Self {
                Self { $($query: Query {
                    sql: render(include_str!(concat!("../sql/queries/", stringify!($query), ".sql"))),
                    types: &[$(Type::$type),*],
                },)* }
            }

            /// Every query by name, for the test that prepares them all.
            #[cfg(test)]
            pub(crate) fn all(&self) -> Vec<(&'static str, &Query)> {
                vec![$((stringify!($query), &self.$query)),*]
            }
        }
    };
}

queries! {
    /// Those that are the same for every stream.
    Queries {
        advance: [INT8, INT8, INT8_ARRAY, UUID_ARRAY, TEXT_ARRAY, UUID_ARRAY, INT8_ARRAY, TEXT_ARRAY, TEXT_ARRAY, FLOAT8_ARRAY, INT8, UUID, INT8, INT8, INT8, INT8, FLOAT8_ARRAY],
        advance_lanes: [INT8, INT8, UUID, INT8, UUID_ARRAY, TEXT_ARRAY, BOOL_ARRAY, UUID_ARRAY, INT8_ARRAY, TEXT_ARRAY, TEXT_ARRAY, FLOAT8_ARRAY, UUID_ARRAY, INT8_ARRAY, TEXT_ARRAY, TEXT_ARRAY, TEXT_ARRAY, FLOAT8_ARRAY, INT8, BOOL, UUID, INT8, INT8, UUID, INT8, INT8, UUID_ARRAY],
        release_lanes: [INT8, INT8, UUID],
        set_mode: [INT8, INT8, TEXT],
        seek: [INT8, INT8, TEXT, INT8, TIMESTAMPTZ, TEXT, TEXT, BOOL],
        replay: [INT8, INT8, INT8, INT8, TIMESTAMPTZ, TIMESTAMPTZ, TEXT, BOOL],
        list_replays: [INT8, INT8],
        cancel_replay: [INT8, INT8, INT8],
        extend: [INT8, INT8, INT8_ARRAY, UUID_ARRAY, TEXT_ARRAY, INT8],
        release: [INT8, INT8, INT8_ARRAY, UUID_ARRAY, TEXT_ARRAY],
        release_claim: [INT8, INT8, UUID],
        release_part: [INT8, INT8, INT8, UUID, TEXT],
        watch: [INT8_ARRAY, INT8_ARRAY, INT8_ARRAY, TIMESTAMPTZ_ARRAY, BOOL_ARRAY, INT8, INT4, INT8_ARRAY, TIMESTAMPTZ_ARRAY],
        move_delayed: [INT8, TIMESTAMPTZ, INT8, INT8],
        cancel_delayed: [INT8, INT8],
        count_delayed: [INT8],
        become_owner: [],
        is_owner: [INT8, INT4],
        expire_owner: [INT8, INT8, INT8],
        ring: [INT8_ARRAY, TEXT],
        settle_in_transaction: [INT8, INT8, UUID, INT8_ARRAY, BOOL, TEXT],
        unsettled: [INT8, INT8, UUID, INT8_ARRAY, BOOL],
        next_id: [INT8, INT8, UUID, INT8],
        take_exceptions: [INT8, INT8, UUID, INT8, BOOL, TIMESTAMPTZ, INT8, INT8],
        settle_exceptions: [INT8, INT8, UUID_ARRAY, INT8_ARRAY, TEXT_ARRAY, TEXT_ARRAY, FLOAT8_ARRAY],
        extend_exceptions: [INT8, INT8, UUID_ARRAY, INT8_ARRAY, INT8],
        count_passed_over: [INT8, INT8, INT8, INT8],
        release_exceptions: [INT8, INT8, UUID_ARRAY, INT8_ARRAY],
        invalid_payloads: [TEXT, BYTEA_ARRAY],
        ensure_partitions: [INT8, INT4, INT4],
        create_stream: [TEXT, TEXT, INT8, BOOL, FLOAT8, BOOL, FLOAT8, INT8, INT8, BOOL, BOOL, FLOAT8],
        alter_stream: [INT8, BOOL, FLOAT8, FLOAT8, INT8, INT8, BOOL, BOOL, FLOAT8],
        retire_partitions: [INT8, INT4],
        skip_to_first: [INT8],
        leaving_partitions: [INT8, INT4],
        archive_referenced: [INT8, INT8],
        leaf_is_locked: [TEXT],
        detach_session: [],
        detach_is_stuck: [TEXT],
        finalize_detach: [INT8, INT8],
        empty_leaf: [INT8, INT8],
        drop_leaf: [INT8, INT8],
        retention_ended: [INT8, BOOL, BOOL, BOOL, BOOL],
        retention_busy: [INT8],
        list_retention_holds: [INT8],
        tidy_archive: [INT8, INT8],
        expire_dead_letters: [INT8, TIMESTAMPTZ, INT8],
        compact: [INT8, INT8, FLOAT8, FLOAT8],
        reclaimable: [INT8],
        partition_size: [TEXT],
        expire_idempotency_keys: [INT8, TIMESTAMPTZ, INT8],
        resolve_commit: [INT8, TEXT, INT4, INT8_ARRAY, TIMESTAMPTZ_ARRAY, BOOL, INT8, INT8],
        drop_stream: [INT8],
        find_stream: [TEXT],
        list_streams: [TEXT],
        create_group: [INT8, TEXT, INT8, FLOAT8, INT4, FLOAT8, FLOAT8, FLOAT8, INT4, FLOAT8, TEXT, TEXT, BOOL],
        alter_group: [INT8, INT8, FLOAT8, INT4, FLOAT8, FLOAT8, FLOAT8, INT4, FLOAT8, BOOL, BOOL],
        pause_group: [INT8, INT8],
        resume_group: [INT8, INT8],
        drop_group: [INT8, INT8],
        find_group: [INT8, TEXT],
        current_bindings: [INT8, INT8],
        set_bindings: [INT8, INT8, TEXT],
        bind: [INT8, INT8, TEXT],
        unbind: [INT8, INT8, TEXT],
        list_binding_sets: [TEXT, TEXT],
        test_bindings: [INT8, TEXT, TEXT],
        is_resolved: [INT8, INT8, INT8],
        stream_head: [INT8],
        position_at: [INT8, TIMESTAMPTZ],
        list_cursors: [TEXT, TEXT],
        count_dead: [INT8, INT8],
        list_exceptions: [TEXT, TEXT, TEXT, INT8, INT8],
        redrive: [INT8, INT8, INT8_ARRAY, INT8],
        discard: [INT8, INT8, INT8_ARRAY, INT8],
        maintenance_look: [UUID, TEXT, FLOAT8, INT8],
        hold_maintenance: [UUID, TEXT, FLOAT8],
        release_maintenance: [UUID],
        record_step: [TEXT, INT8, FLOAT8, TEXT, FLOAT8, TEXT],
        step_memory: [TEXT, INT8],
        maintain_partitions: [INT8],
        seal_partitions: [INT8],
        next_expiry_of_keys: [INT8, TIMESTAMPTZ],
        maintenance_holder: [],
        maintain_groups: [INT8, INT8],
        note_consumers: [INT8_ARRAY],
        expire_groups_after: [INT8, FLOAT8],
        maintenance_steps: [],
        maintenance_failures: [INT8],
        server_time: [],
        create_schedule: [TEXT, TEXT, TEXT, TEXT, TIMESTAMPTZ, TEXT, TEXT, FLOAT8, INT8, TEXT, TEXT, TEXT, FLOAT8, BOOL, TIMESTAMPTZ, TIMESTAMPTZ],
        alter_schedule: [TEXT, TEXT, TIMESTAMPTZ, TEXT, TEXT, FLOAT8, INT8, TEXT, TEXT, TEXT, TEXT, FLOAT8, BOOL, TIMESTAMPTZ, TIMESTAMPTZ],
        pause_schedule: [TEXT],
        resume_schedule: [TEXT, TIMESTAMPTZ, TIMESTAMPTZ],
        drop_schedule: [TEXT],
        run_schedule: [TEXT],
        list_schedules: [TEXT, TEXT, INT8],
        list_schedule_runs: [TEXT, INT8, INT8],
        due_schedules: [TIMESTAMPTZ, INT8],
        fire_schedule: [INT8, INT8, TIMESTAMPTZ_ARRAY, INT4, INT8, TIMESTAMPTZ, TIMESTAMPTZ, TIMESTAMPTZ],
        fail_schedule: [INT8, INT8, TEXT],
        import_upto: [INT8, TEXT],
        move_cursor: [INT8, INT8, INT8, INT8],
        doctor: [TEXT],
        doctor_repair: [TEXT, TEXT],
    }
}

queries! {
    /// Those that name a stream's tables or depend on its payload type.
    StreamQueries {
        // The payloads' type is added by hand where these three are sent.
        insert: [TEXT_ARRAY, TEXT_ARRAY, TEXT_ARRAY],
        produce: [TEXT_ARRAY, TEXT_ARRAY, TEXT_ARRAY, TEXT_ARRAY, TIMESTAMPTZ_ARRAY, FLOAT8_ARRAY, TIMESTAMPTZ_ARRAY, FLOAT8_ARRAY, INT8_ARRAY],
        import_messages: [INT8, BOOL, TEXT, INT8_ARRAY, TEXT_ARRAY, TEXT_ARRAY, TEXT_ARRAY, TIMESTAMPTZ_ARRAY, TIMESTAMPTZ_ARRAY],
        read_log: [INT8, INT8, INT8, INT8, INT8],
        list_delayed: [TIMESTAMPTZ, INT8, INT8],
        fetch: [INT8, INT8, UUID, INT8, INT8, INT8],
        fetch_range: [INT8, UUID, INT8, INT8, INT8],
        fetch_messages: [INT8, INT8_ARRAY, INT8, INT8],
        read_messages: [INT8_ARRAY],
        // Of compacted streams.
        latest: [TEXT],
        current: [TEXT, INT8],
        settle_message: [INT8, INT8, UUID, INT8, TEXT],
    }
}

impl Queries {
    pub(crate) fn new(schema: &Schema) -> Self {
        Self::render(|text| schema.render(text))
    }
}

impl StreamQueries {
    pub(crate) fn new(schema: &Schema, stream: i64, payload_type: PayloadType) -> Self {
        Self::render(|text| {
            schema
                .render(text)
                .replace("{stream}", &stream.to_string())
                .replace("{payload_type}", payload_type.as_str())
        })
    }
}

#[cfg(test)]
mod tests {
    use sqlstreams_dev::Cluster;

    use super::*;
    use crate::Client;

    /// What a macro that checks SQL at build time would buy, without a database at build time.
    #[tokio::test]
    async fn every_query_prepares_with_the_types_it_is_sent_with() {
        let cluster = tokio::task::spawn_blocking(|| Cluster::builder().durable(false).start());
        let cluster = cluster.await.unwrap().unwrap();
        let schema = Schema::new(r#"we"ird, Schema é"#).unwrap();
        let client = Client::builder(&cluster.url("postgres")).schema(schema.name());
        let client = client.connect().await.unwrap();
        let connection = client.connection("prepare").await.unwrap();
        let payload_types =
            [PayloadType::Json, PayloadType::Jsonb, PayloadType::Text, PayloadType::Bytea];
        for (i, payload_type) in payload_types.into_iter().enumerate() {
            let stream = client.stream::<u8>(format!("s{i}")).payload_type(payload_type);
            let stream = stream.compacted(true).create().await.unwrap();
            let of_stream = StreamQueries::new(&schema, stream.id(), payload_type);
            for (name, query) in Queries::new(&schema).all().into_iter().chain(of_stream.all()) {
                let types = match name {
                    "insert" | "produce" | "import_messages" => {
                        [query.types, &[payload_type.array_type()]].concat()
                    }
                    _ => query.types.to_vec(),
                };
                let prepared = connection.prepare_typed(&query.sql, &types).await;
                let prepared = prepared.unwrap_or_else(|e| panic!("{name}: {e:?}"));
                assert_eq!(prepared.params(), types, "{name}");
            }
        }
        // Stopping blocks.
        tokio::task::spawn_blocking(move || drop(cluster)).await.unwrap();
    }
}
