SELECT id, key, routing_key, headers::text, produced_at, payload FROM {schema}.current_messages_{stream}($1, $2)
