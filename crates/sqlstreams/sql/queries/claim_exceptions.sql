SELECT id, key, routing_key, headers::text, produced_at, payload, attempts, delays, first_failed_at, due_at, (extract(epoch FROM lease_duration) * 1000)::bigint
FROM {schema}.claim_exceptions($1, $2, $3, $4, $5, $6, NULL::{payload_type})
