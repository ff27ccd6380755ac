-- Settle, record failures, claim. Intervals travel as milliseconds, multiranges as text.
SELECT lost, seq, pending::text, (extract(epoch FROM lease_duration) * 1000)::bigint, paused, limited, (extract(epoch FROM wait) * 1000)::bigint, looked_at, lanes, unread
FROM {schema}.advance($1, $2, $3, $4, $5::text[]::int8multirange[], $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)
