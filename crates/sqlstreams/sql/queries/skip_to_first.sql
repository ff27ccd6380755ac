SELECT more FROM {schema}.skip_to_first($1)
