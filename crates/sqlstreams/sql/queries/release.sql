SELECT {schema}.release($1, $2, $3, $4, $5::text[]::int8multirange[])
