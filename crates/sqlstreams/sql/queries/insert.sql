-- Without the id column: producers need no more than INSERT, and SELECT of what it returns.
INSERT INTO {schema}.message_log_{stream} (key, routing_key, headers, payload)
SELECT u.key, u.routing_key, u.headers::jsonb, u.payload
FROM unnest($1::text[], $2::text[], $3::text[], $4::{payload_type}[]) AS u(key, routing_key, headers, payload)
RETURNING id, produced_at
