-- Messages of the log by id, whatever the groups have done with them.
SELECT id, key, routing_key, headers::text, produced_at, payload FROM {schema}.message_log_{stream} WHERE id = ANY ($1) ORDER BY id
