SELECT {schema}.settle_in_transaction($1, $2, $3, $4, $5, $6)
