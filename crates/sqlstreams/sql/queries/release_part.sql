SELECT {schema}.release_part($1, $2, $3, $4, $5::int8multirange)
