SELECT id, written_at, duplicate, differs, delayed, (extract(epoch FROM deliver_at - written_at) * 1000)::bigint, witness_1, witness_2,
       pg_current_xact_id()::text, pg_backend_pid()
FROM {schema}.produce_{stream}($1, $2, $3, $10, $4, $5, $6, $7, $8, $9)
