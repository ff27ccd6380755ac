SELECT id, attempts, due_at, (extract(epoch FROM lease_duration) * 1000)::bigint, delays, first_failed_at, lane
FROM {schema}.take_exceptions($1, $2, $3, $4, $5, $6, $7, $8)
