SELECT {schema}.count_dead($1, $2)
