SELECT {schema}.pause_group($1, $2)
