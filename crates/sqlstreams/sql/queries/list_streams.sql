SELECT s.id, s.name, s.payload_type, s.partition_size, s.created_at, {schema}.stream_head(s.id), (SELECT count(*) FROM {schema}.consumer_group AS g WHERE g.stream_id = s.id), s.notify,
       extract(epoch FROM s.idempotency_window)::float8, s.compacted, extract(epoch FROM s.group_expiry)::float8
FROM {schema}.stream AS s WHERE $1 IS NULL OR s.name = $1 ORDER BY s.name
