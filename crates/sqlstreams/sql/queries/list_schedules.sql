SELECT id, name, stream, stream_id, state, cron, at, zone, missed, extract(epoch FROM grace)::float8, catch_up, key, headers::text, routing_key,
       extract(epoch FROM expires_in)::float8, payload, created_at, since, next_fire, last_fire, last_message_id, last_at, produced, not_produced,
       failures, retry_at, last_error, failed_at
FROM {schema}.list_schedules($1, p_after => $2, p_limit => $3)
