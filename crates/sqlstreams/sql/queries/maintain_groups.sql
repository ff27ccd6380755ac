SELECT next_after, extract(epoch FROM next_look)::float8 FROM {schema}.maintain_groups($1, $2)
