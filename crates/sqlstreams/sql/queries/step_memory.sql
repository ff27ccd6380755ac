SELECT memory::text FROM {schema}.maintenance_step WHERE step = $1 AND stream_id = $2
