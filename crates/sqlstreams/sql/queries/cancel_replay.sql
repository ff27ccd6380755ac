SELECT {schema}.cancel_replay($1, $2, $3)
