SELECT {schema}.set_mode($1, $2, $3)
