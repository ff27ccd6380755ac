SELECT made, more, trouble FROM {schema}.maintain_partitions($1)
