SELECT l.held, (extract(epoch FROM l.remaining) * 1000)::bigint, l.next_after, l.step, l.stream_id, (extract(epoch FROM l.due_in) * 1000)::bigint, s.name
FROM {schema}.maintenance_look($1, $2, make_interval(secs => $3), $4) AS l
LEFT JOIN {schema}.stream AS s ON s.id = l.stream_id
ORDER BY l.step NULLS FIRST, l.stream_id
