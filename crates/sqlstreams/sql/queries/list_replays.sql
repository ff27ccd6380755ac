SELECT replay, from_id, upto_id, waiting, leased, bindings::text, created_at, created_by, cancelled FROM {schema}.list_replays($1, $2)
