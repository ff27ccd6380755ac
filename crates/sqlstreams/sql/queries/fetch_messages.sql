SELECT id, key, routing_key, headers::text, produced_at, more, payload, floor(extract(epoch FROM remaining) * 1000000)::bigint, NULL::smallint
FROM {schema}.fetch_messages($1, $2, $3, NULL::{payload_type})
