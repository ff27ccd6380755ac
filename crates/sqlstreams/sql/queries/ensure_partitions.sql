SELECT {schema}.ensure_partitions($1, $2, $3)
