SELECT {schema}.unsettled($1, $2, $3, $4, $5)
