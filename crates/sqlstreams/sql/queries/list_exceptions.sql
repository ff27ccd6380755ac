SELECT message_id, state, attempts, delays, losses, redrives, due_at, key, last_error, history::text, first_failed_at, dead_at
FROM {schema}.list_exceptions($1, $2, $3, $4, $5)
