SELECT replay, from_id, upto_id FROM {schema}.replay($1, $2, $3, $4, $5, $6, $7::text::jsonb, $8)
