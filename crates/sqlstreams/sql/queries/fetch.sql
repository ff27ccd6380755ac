SELECT id, key, routing_key, headers::text, produced_at, more, payload
FROM {schema}.fetch($1, $2, $3, $4, $5, $6, NULL::{payload_type})
