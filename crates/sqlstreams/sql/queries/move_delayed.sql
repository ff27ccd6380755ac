SELECT moved, upto, upto_id, looked_at, (extract(epoch FROM next_due) * 1000)::bigint, busy, no_room
FROM {schema}.move_delayed($1, coalesce($2, '-infinity'), $3, $4)
