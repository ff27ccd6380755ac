SELECT more, urgent, trouble FROM {schema}.maintain_partitions($1)
