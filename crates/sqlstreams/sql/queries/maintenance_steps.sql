SELECT step, count(stream_id), sum(runs)::bigint, sum(failures)::bigint, count(*) FILTER (WHERE failing > 0), max(started_at), extract(epoch FROM avg(duration))::float8, extract(epoch FROM max(duration))::float8
FROM {schema}.maintenance_step GROUP BY step ORDER BY step
