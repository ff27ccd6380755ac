SELECT id, key, routing_key, headers::text, produced_at, more, payload, floor(extract(epoch FROM remaining) * 1000000)::bigint, lane
FROM {schema}.fetch($1, $2, $3, $4, $5, $6, NULL::{payload_type})
