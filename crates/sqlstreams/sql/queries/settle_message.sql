SELECT {schema}.settle_message_{stream}($1, $2, $3, $4, $5)
