SELECT more FROM {schema}.seal_partitions($1)
