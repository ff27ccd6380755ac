PREPARE "advance" (int8, int8, _int8, _uuid, _text, _uuid, _int8, _text, _text, _float8, int8, uuid, int8, int8, int8, int8, _float8) AS
-- Settle, record failures, claim. Intervals travel as milliseconds, multiranges as text.
SELECT lost, seq, pending::text, (extract(epoch FROM lease_duration) * 1000)::bigint, paused, limited, (extract(epoch FROM wait) * 1000)::bigint, looked_at, lanes, unread
FROM "sqlstreams".advance($1, $2, $3, $4, $5::text[]::int8multirange[], $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17);

PREPARE "advance_lanes" (int8, int8, uuid, int8, _uuid, _text, _bool, _uuid, _int8, _text, _text, _float8, _uuid, _int8, _text, _text, _text, _float8, int8, bool, uuid, int8, int8, uuid, int8, int8, _uuid) AS
SELECT lost, seq, lanes, pending::text, ids, attempts, delays, first_failed_at, suspect, (extract(epoch FROM lease_duration) * 1000)::bigint, paused, waiting, limited,
    (extract(epoch FROM wait) * 1000)::bigint, looked_at, reached
FROM "sqlstreams".advance_lanes($1, $2, $3, $4, $5, $6::text[]::int8multirange[], $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27);

PREPARE "release_lanes" (int8, int8, uuid) AS
SELECT "sqlstreams".release_lanes($1, $2, $3);

PREPARE "set_mode" (int8, int8, text) AS
SELECT "sqlstreams".set_mode($1, $2, $3);

PREPARE "extend" (int8, int8, _int8, _uuid, _text, int8) AS
SELECT token, seq FROM "sqlstreams".extend($1, $2, $3, $4, $5::text[]::int8multirange[], $6);

PREPARE "release" (int8, int8, _int8, _uuid, _text) AS
SELECT "sqlstreams".release($1, $2, $3, $4, $5::text[]::int8multirange[]);

PREPARE "release_claim" (int8, int8, uuid) AS
SELECT "sqlstreams".release_claim($1, $2, $3);

PREPARE "release_part" (int8, int8, int8, uuid, text) AS
SELECT "sqlstreams".release_part($1, $2, $3, $4, $5::int8multirange);

PREPARE "watch" (_int8, _int8, _int8, _timestamptz, _bool, int8, int4, _int8, _timestamptz) AS
SELECT group_id, gone, fresh, lapsed, due, suspect, paused, claimed, (extract(epoch FROM next_due) * 1000)::bigint, owners, missing, NULL::bigint, NULL::bigint
FROM "sqlstreams".watch($1, $2, $3, $4, $5, $6, $7)
UNION ALL
-- And of these streams when the next delayed message is due.
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, stream, (extract(epoch FROM due_in) * 1000)::bigint
FROM "sqlstreams".next_delayed($8, $9);

PREPARE "move_delayed" (int8, timestamptz, int8, int8) AS
SELECT moved, upto, upto_id, looked_at, (extract(epoch FROM next_due) * 1000)::bigint, busy, no_room
FROM "sqlstreams".move_delayed($1, coalesce($2, '-infinity'), $3, $4);

PREPARE "cancel_delayed" (int8, int8) AS
SELECT "sqlstreams".cancel_delayed($1, $2);

PREPARE "count_delayed" (int8) AS
SELECT "sqlstreams".count_delayed($1);

PREPARE "become_owner" AS
SELECT "sqlstreams".become_owner(), pg_backend_pid(), "sqlstreams".ring_channel();

PREPARE "is_owner" (int8, int4) AS
SELECT "sqlstreams".is_owner($1, $2);

PREPARE "expire_owner" (int8, int8, int8) AS
SELECT "sqlstreams".expire_owner($1, $2, $3);

PREPARE "ring" (_int8) AS
-- By itself, without a transaction around it: nobody waits for the disk.
SELECT set_config('synchronous_commit', 'off', true), "sqlstreams".ring($1);

PREPARE "settle_in_transaction" (int8, int8, uuid, _int8, bool, text) AS
SELECT "sqlstreams".settle_in_transaction($1, $2, $3, $4, $5, $6);

PREPARE "unsettled" (int8, int8, uuid, _int8, bool) AS
SELECT "sqlstreams".unsettled($1, $2, $3, $4, $5);

PREPARE "next_id" (int8, int8, uuid, int8) AS
SELECT "sqlstreams".next_id($1, $2, $3, $4);

PREPARE "take_exceptions" (int8, int8, uuid, int8, bool, timestamptz, int8, int8) AS
SELECT id, attempts, due_at, (extract(epoch FROM lease_duration) * 1000)::bigint, delays, first_failed_at, lane
FROM "sqlstreams".take_exceptions($1, $2, $3, $4, $5, $6, $7, $8);

PREPARE "settle_exceptions" (int8, int8, _uuid, _int8, _text, _text, _float8) AS
SELECT "sqlstreams".settle_exceptions($1, $2, $3, $4, $5, $6, $7);

PREPARE "extend_exceptions" (int8, int8, _uuid, _int8, int8) AS
SELECT "sqlstreams".extend_exceptions($1, $2, $3, $4, $5);

PREPARE "count_passed_over" (int8, int8, int8, int8) AS
SELECT "sqlstreams".count_passed_over($1, $2, $3, $4);

PREPARE "release_exceptions" (int8, int8, _uuid, _int8) AS
SELECT "sqlstreams".release_exceptions($1, $2, $3, $4);

PREPARE "invalid_payloads" (text, _bytea) AS
SELECT place, reason FROM "sqlstreams".invalid_payloads($1, $2);

PREPARE "ensure_partitions" (int8, int4) AS
SELECT "sqlstreams".ensure_partitions($1, $2);

PREPARE "create_stream" (text, text, int8, bool, float8, bool) AS
SELECT "sqlstreams".create_stream($1, $2, $3, $4, make_interval(secs => $5), $6);

PREPARE "alter_stream" (int8, bool, float8) AS
SELECT "sqlstreams".alter_stream($1, $2, make_interval(secs => $3));

PREPARE "compact" (int8, int8, float8, float8) AS
SELECT looked_at, removed, upto, floor, busy FROM "sqlstreams".compact($1, $2, 10000, make_interval(secs => $3), make_interval(secs => $4));

PREPARE "reclaimable" (int8) AS
SELECT partition, bytes, permitted FROM "sqlstreams".reclaimable($1);

PREPARE "partition_size" (text) AS
-- What a partition takes, and in which file: VACUUM (FULL) writes a new one.
SELECT pg_table_size($1::text::regclass), pg_relation_filenode($1::text::regclass)::bigint;

PREPARE "expire_idempotency_keys" (int8, timestamptz, int8) AS
SELECT removed, upto FROM "sqlstreams".expire_idempotency_keys($1, coalesce($2, '-infinity'), $3);

PREPARE "current_transaction" AS
SELECT pg_current_xact_id()::text, pg_backend_pid();

PREPARE "resolve_commit" (int8, text, int4, _int8, _timestamptz, bool, int8, int8) AS
SELECT "sqlstreams".resolve_commit($1, $2, $3, $4, $5, $6, $7, $8);

PREPARE "drop_stream" (int8) AS
SELECT "sqlstreams".drop_stream($1);

PREPARE "find_stream" (text) AS
SELECT id, payload_type, partition_size, created_at, compacted FROM "sqlstreams".stream WHERE name = $1;

PREPARE "list_streams" (text) AS
SELECT s.id, s.name, s.payload_type, s.partition_size, s.created_at, "sqlstreams".stream_head(s.id), (SELECT count(*) FROM "sqlstreams".consumer_group AS g WHERE g.stream_id = s.id), s.notify,
       extract(epoch FROM s.idempotency_window)::float8, s.compacted
FROM "sqlstreams".stream AS s WHERE $1 IS NULL OR s.name = $1 ORDER BY s.name;

PREPARE "create_group" (int8, text, int8, float8, int4, float8, float8, float8, int4, float8, text, text, bool) AS
-- Durations travel as seconds; NULL keeps the default.
SELECT "sqlstreams".create_group($1, $2, $3, make_interval(secs => $4), $5, make_interval(secs => $6), $7, make_interval(secs => $8), $9, $10,
                             p_bindings => $11::text::jsonb, p_mode => $12, p_newest_only => $13);

PREPARE "alter_group" (int8, int8, float8, int4, float8, float8, float8, int4, float8, bool, bool) AS
-- Durations travel as seconds; NULL keeps what is.
SELECT "sqlstreams".alter_group($1, $2, make_interval(secs => $3), $4, make_interval(secs => $5), $6, make_interval(secs => $7), $8, $9, $10, $11);

PREPARE "pause_group" (int8, int8) AS
SELECT "sqlstreams".pause_group($1, $2);

PREPARE "resume_group" (int8, int8) AS
SELECT "sqlstreams".resume_group($1, $2);

PREPARE "drop_group" (int8, int8) AS
SELECT "sqlstreams".drop_group($1, $2);

PREPARE "find_group" (int8, text) AS
SELECT id, extract(epoch FROM lease_duration)::float8, max_attempts, extract(epoch FROM backoff_base)::float8, backoff_factor, extract(epoch FROM backoff_cap)::float8, created_at, mode
FROM "sqlstreams".consumer_group WHERE stream_id = $1 AND name = $2;

PREPARE "current_bindings" (int8, int8) AS
SELECT "sqlstreams".current_bindings($1, $2)::text;

PREPARE "set_bindings" (int8, int8, text) AS
SELECT "sqlstreams".set_bindings($1, $2, $3::text::jsonb);

PREPARE "bind" (int8, int8, text) AS
-- One binding travels as an array of one, like many do.
SELECT "sqlstreams".bind($1, $2, b ->> 'pattern', b -> 'headers') FROM (SELECT $3::text::jsonb -> 0 AS b) AS one;

PREPARE "unbind" (int8, int8, text) AS
SELECT "sqlstreams".unbind($1, $2, b ->> 'pattern', b -> 'headers') FROM (SELECT $3::text::jsonb -> 0 AS b) AS one;

PREPARE "list_binding_sets" (text, text) AS
SELECT version, after_id, bindings::text, changed_at, changed_by FROM "sqlstreams".list_binding_sets($1, $2);

PREPARE "test_bindings" (int8, text, text) AS
-- The binding as an array of one; NULL for a group that has none.
SELECT consumer_group, CASE WHEN pattern IS NOT NULL OR headers IS NOT NULL
                            THEN jsonb_build_array(jsonb_build_object('pattern', pattern, 'headers', headers))::text END
FROM "sqlstreams".test_bindings($1, $2, $3::text::jsonb);

PREPARE "is_resolved" (int8, int8, int8) AS
SELECT "sqlstreams".is_resolved($1, $2, $3);

PREPARE "stream_head" (int8) AS
SELECT "sqlstreams".stream_head($1);

PREPARE "position_at" (int8, timestamptz) AS
SELECT "sqlstreams".position_at($1, $2);

PREPARE "list_cursors" (text, text) AS
-- Durations travel as seconds.
SELECT c.stream, c.consumer_group, c.claimed, c.resolved, c.head, c.lag, c.open_leases, c.ready, c.inflight, c.dead, c.paused, c.max_in_flight, c.rate_limit,
       extract(epoch FROM g.lease_duration)::float8, g.max_attempts, extract(epoch FROM g.backoff_base)::float8, g.backoff_factor, extract(epoch FROM g.backoff_cap)::float8, c.deferred, c.mode, g.newest_only, c.expired, c.superseded
FROM "sqlstreams".list_cursors($1, $2) AS c JOIN "sqlstreams".consumer_group AS g ON g.id = c.group_id ORDER BY c.stream, c.consumer_group;

PREPARE "list_exceptions" (text, text, text, int8, int8) AS
SELECT message_id, state, attempts, delays, losses, redrives, due_at, key, last_error, history::text, first_failed_at, dead_at
FROM "sqlstreams".list_exceptions($1, $2, $3, $4, $5);

PREPARE "redrive" (int8, int8, _int8, int8) AS
SELECT "sqlstreams".redrive($1, $2, $3, $4);

PREPARE "discard" (int8, int8, _int8, int8) AS
SELECT "sqlstreams".discard($1, $2, $3, $4);

PREPARE "insert" (_text, _text, _text, _json) AS
-- Without the id column: producers need no more than INSERT, and SELECT of what it returns.
INSERT INTO "sqlstreams".message_log_1 (key, routing_key, headers, payload)
SELECT u.key, u.routing_key, u.headers::jsonb, u.payload
FROM unnest($1::text[], $2::text[], $3::text[], $4::json[]) AS u(key, routing_key, headers, payload)
RETURNING id, produced_at;

PREPARE "produce" (_text, _text, _text, _text, _timestamptz, _float8, _timestamptz, _float8, _int8, _json) AS
SELECT id, written_at, duplicate, differs, delayed, (extract(epoch FROM deliver_at - written_at) * 1000)::bigint, witness_1, witness_2
FROM "sqlstreams".produce_1($1, $2, $3, $10, $4, $5, $6, $7, $8, $9);

PREPARE "list_delayed" (timestamptz, int8, int8) AS
-- Messages that are not due yet, in that order; from $1 and $2 on.
SELECT id, deliver_at, sent_at, key, routing_key, headers::text, payload, expires_at FROM "sqlstreams".message_delayed_1
WHERE (deliver_at, id) > (coalesce($1, '-infinity'), $2) ORDER BY deliver_at, id LIMIT $3;

PREPARE "fetch" (int8, int8, uuid, int8, int8, int8) AS
SELECT id, key, routing_key, headers::text, produced_at, more, payload, floor(extract(epoch FROM remaining) * 1000000)::bigint, lane, false
FROM "sqlstreams".fetch($1, $2, $3, $4, $5, $6, NULL::json);

PREPARE "fetch_messages" (int8, _int8, int8, int8) AS
SELECT id, key, routing_key, headers::text, produced_at, more, payload, floor(extract(epoch FROM remaining) * 1000000)::bigint, "sqlstreams".lane_of(key, id)::smallint, superseded
FROM "sqlstreams".fetch_messages($1, $2, $3, NULL::json, $4);

PREPARE "read_messages" (_int8) AS
-- Messages of the log by id, whatever the groups have done with them.
SELECT id, key, routing_key, headers::text, produced_at, payload FROM "sqlstreams".message_log_1 WHERE id = ANY ($1) ORDER BY id;

PREPARE "latest" (text) AS
SELECT id, key, routing_key, headers::text, produced_at, payload FROM "sqlstreams".latest_message_1($1);

PREPARE "current" (text, int8) AS
SELECT id, key, routing_key, headers::text, produced_at, payload FROM "sqlstreams".current_messages_1($1, $2);

PREPARE "settle_message" (int8, int8, uuid, int8, text) AS
SELECT "sqlstreams".settle_message_1($1, $2, $3, $4, $5);

