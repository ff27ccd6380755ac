SELECT {schema}.drop_stream($1)
