-- The messages of a lease that lie in $3 <= id < $4, from the log itself: what a function returns is collected before the first of it
-- is sent. The bounds are for the planner, which looks at no partition beyond them.
WITH claimed AS MATERIALIZED (SELECT first, last FROM {schema}.claimed_range({stream}, $1, $2, $3))
SELECT id, key, routing_key, headers::text, produced_at, CASE WHEN expires_at <= now() THEN NULL ELSE payload END,
       CASE WHEN expires_at <= now() THEN 0 WHEN isfinite(expires_at) THEN floor(extract(epoch FROM expires_at - now()) * 1000000)::bigint END
FROM {schema}.message_log_{stream}
WHERE id >= $3 AND id < $4 AND id >= (SELECT first FROM claimed) AND id <= (SELECT last FROM claimed)
ORDER BY id LIMIT $5
