SELECT {schema}.drop_group($1, $2)
