SELECT id, payload_type, partition_size, created_at, compacted FROM {schema}.stream WHERE name = $1
