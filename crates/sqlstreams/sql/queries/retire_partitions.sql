SELECT held, permitted FROM {schema}.retire_partitions($1, $2)
