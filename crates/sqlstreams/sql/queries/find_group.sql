SELECT id, extract(epoch FROM lease_duration)::float8, max_attempts, extract(epoch FROM backoff_base)::float8, backoff_factor, extract(epoch FROM backoff_cap)::float8, created_at, mode
FROM {schema}.consumer_group WHERE stream_id = $1 AND name = $2
