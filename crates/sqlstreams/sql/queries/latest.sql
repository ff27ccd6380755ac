SELECT id, key, routing_key, headers::text, produced_at, payload FROM {schema}.latest_message_{stream}($1)
