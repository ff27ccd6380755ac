SELECT {schema}.cancel_delayed($1, $2)
