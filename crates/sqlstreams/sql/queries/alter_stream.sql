SELECT {schema}.alter_stream($1, $2, make_interval(secs => $3))
