SELECT {schema}.create_stream($1, $2, $3, $4, make_interval(secs => $5), $6)
