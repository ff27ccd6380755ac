SELECT {schema}.create_stream($1, $2, $3, $4, make_interval(secs => $5), $6, make_interval(secs => $7), $8, $9, $10, $11, make_interval(secs => $12))
