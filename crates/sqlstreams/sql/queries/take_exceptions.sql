SELECT id, attempts, due_at, (extract(epoch FROM lease_duration) * 1000)::bigint
FROM {schema}.take_exceptions($1, $2, $3, $4, $5, $6)
