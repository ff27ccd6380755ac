SELECT {schema}.next_id($1, $2, $3, $4)
