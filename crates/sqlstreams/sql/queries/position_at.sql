SELECT {schema}.position_at($1, $2)
