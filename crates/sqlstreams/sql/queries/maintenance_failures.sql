SELECT m.step, s.name, m.failing, m.last_error, m.failed_at, m.next_due
FROM {schema}.maintenance_step AS m LEFT JOIN {schema}.stream AS s ON s.id = m.stream_id
WHERE m.failing > 0 ORDER BY m.failed_at DESC, m.step, s.name LIMIT $1
