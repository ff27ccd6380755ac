SELECT {schema}.discard($1, $2, $3, $4)
