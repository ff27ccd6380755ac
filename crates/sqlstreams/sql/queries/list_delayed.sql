-- Messages that are not due yet, in that order; from $1 and $2 on.
SELECT id, deliver_at, sent_at, key, routing_key, headers::text, payload, expires_at FROM {schema}.message_delayed_{stream}
WHERE (deliver_at, id) > (coalesce($1, '-infinity'), $2) ORDER BY deliver_at, id LIMIT $3
