SELECT outcome, stream_id, ids FROM {schema}.fire_schedule($1, $2, $3, $4, $5, $6, $7, $8)
