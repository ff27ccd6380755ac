SELECT {schema}.redrive($1, $2, $3, $4)
