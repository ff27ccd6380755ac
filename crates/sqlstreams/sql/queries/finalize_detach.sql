SELECT {schema}.finalize_detach($1, $2)
