SELECT lost, seq, lanes, pending::text, ids, attempts, delays, first_failed_at, suspect, (extract(epoch FROM lease_duration) * 1000)::bigint, paused, waiting, limited,
    (extract(epoch FROM wait) * 1000)::bigint, looked_at, reached
FROM {schema}.advance_lanes($1, $2, $3, $4, $5, $6::text[]::int8multirange[], $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27)
