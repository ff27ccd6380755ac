SELECT s.id, s.name, s.payload_type, s.partition_size, s.created_at, {schema}.stream_head(s.id), (SELECT count(*) FROM {schema}.consumer_group AS g WHERE g.stream_id = s.id), s.notify,
       extract(epoch FROM s.idempotency_window)::float8, s.compacted,
       extract(epoch FROM s.retain_for)::float8, s.retain_bytes, s.retain_count, s.retain_resolved, s.drop_unread, extract(epoch FROM s.retain_dead_for)::float8, s.first_id,
       h.reason, h.consumer_group, h.resolved, h.since, h.detail, extract(epoch FROM s.group_expiry)::float8
FROM {schema}.stream AS s LEFT JOIN LATERAL {schema}.retention_hold(s.id) AS h ON true WHERE $1 IS NULL OR s.name = $1 ORDER BY s.name
