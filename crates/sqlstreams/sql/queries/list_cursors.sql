-- Durations travel as seconds.
SELECT c.stream, c.consumer_group, c.claimed, c.resolved, c.head, c.lag, c.open_leases, c.ready, c.inflight, c.dead, c.paused, c.max_in_flight, c.rate_limit,
       extract(epoch FROM g.lease_duration)::float8, g.max_attempts, extract(epoch FROM g.backoff_base)::float8, g.backoff_factor, extract(epoch FROM g.backoff_cap)::float8, c.deferred, c.mode, g.newest_only, c.expired, c.superseded,
       CASE WHEN w.warned_at IS NOT NULL THEN greatest(w.changed_at, w.seen_at) + s.group_expiry END, c.dropped, c.replaying, c.estimated
FROM {schema}.list_cursors($1, $2) AS c JOIN {schema}.consumer_group AS g ON g.id = c.group_id
JOIN {schema}.stream AS s ON s.id = g.stream_id LEFT JOIN {schema}.group_watch AS w ON w.group_id = g.id ORDER BY c.stream, c.consumer_group
