SELECT {schema}.create_stream($1, $2, $3, $4)
