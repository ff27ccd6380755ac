-- Messages by id, whatever the groups have done with them; of partitions that have left, those that were kept.
SELECT id, key, routing_key, headers::text, produced_at, payload FROM {schema}.message_log_{stream} WHERE id = ANY ($1)
UNION ALL
SELECT id, key, routing_key, headers::text, produced_at, payload FROM {schema}.message_archive_{stream} AS a
WHERE id = ANY ($1) AND NOT EXISTS (SELECT FROM {schema}.message_log_{stream} AS m WHERE m.id = a.id) ORDER BY id
