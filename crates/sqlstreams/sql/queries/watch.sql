SELECT group_id, gone, fresh, lapsed, due, suspect, paused, claimed, (extract(epoch FROM next_due) * 1000)::bigint, owners, missing
FROM {schema}.watch($1, $2, $3, $4, $5, $6, $7)
