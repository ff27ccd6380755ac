SELECT partition, bytes, permitted FROM {schema}.reclaimable($1)
