SELECT lost, seq, pending::text, ids, attempts, delays, first_failed_at, suspect, (extract(epoch FROM lease_duration) * 1000)::bigint, paused, waiting
FROM {schema}.advance_lanes($1, $2, $3, $4, $5, $6, $7::text[]::int8multirange[], $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22)
