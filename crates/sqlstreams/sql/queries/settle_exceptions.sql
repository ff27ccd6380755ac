SELECT {schema}.settle_exceptions($1, $2, $3, $4, $5, $6, $7)
