SELECT looked_at, (extract(epoch FROM due_in) * 1000000)::bigint, id, turn, stream_id, name, cron, at, zone, missed, extract(epoch FROM grace)::float8, catch_up, since, done_until
FROM {schema}.due_schedules($1, $2)
