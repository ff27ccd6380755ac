SELECT {schema}.extend_exceptions($1, $2, $3, $4, $5)
