SELECT number, state, parent, leaf, present, attached, pending FROM {schema}.leaving_partitions($1, $2)
