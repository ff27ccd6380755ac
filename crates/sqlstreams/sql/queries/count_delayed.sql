SELECT {schema}.count_delayed($1)
