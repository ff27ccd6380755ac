SELECT group_id, gone, fresh, lapsed, due, suspect, paused, claimed, (extract(epoch FROM next_due) * 1000)::bigint, owners, missing, NULL::bigint, NULL::bigint
FROM {schema}.watch($1, $2, $3, $4, $5, $6, $7)
UNION ALL
-- And of these streams when the next delayed message is due.
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, stream, (extract(epoch FROM due_in) * 1000)::bigint
FROM {schema}.next_delayed($8, $9)
