SELECT r.number, r.kind, r.fire_time, r.at, r.message_id, r.missed
FROM {schema}.schedule AS s JOIN {schema}.schedule_run AS r ON r.schedule_id = s.id
WHERE s.name = $1 AND (r.number < $2 OR $2 IS NULL) ORDER BY r.number DESC LIMIT $3
