SELECT {schema}.record_step($1, $2, clock_timestamp() - make_interval(secs => $3), $4, make_interval(secs => $5), $6::text::jsonb)
