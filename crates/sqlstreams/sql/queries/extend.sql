SELECT token, seq FROM {schema}.extend($1, $2, $3, $4, $5::text[]::int8multirange[], $6)
