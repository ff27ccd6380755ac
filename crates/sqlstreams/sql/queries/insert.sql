-- Without the id column: producers need no more than INSERT, and SELECT of what it returns.
--
-- Arrays in the select list are read as they are, without a copy of each payload on the way. They are of one length, or
-- empty: NULL for all. The answer is one row, since a row for each message costs more than its insert's index does.
WITH stored AS (
    INSERT INTO {schema}.message_log_{stream} (key, routing_key, headers, payload)
    SELECT unnest($1::text[]), unnest($2::text[]), unnest($3::text[])::jsonb, unnest($4::{payload_type}[])
    RETURNING id, produced_at)
SELECT array_agg(id), array_agg(produced_at), pg_current_xact_id()::text, pg_backend_pid() FROM stored
