SELECT {schema}.stream_head($1)
