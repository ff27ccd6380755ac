-- A page of the log; the last row has no id, and says how far it goes.
SELECT id, key, routing_key, headers::text, produced_at, payload, expires_at, upto, head FROM {schema}.read_log($1, $2, $3, $4, $5, NULL::{payload_type})
