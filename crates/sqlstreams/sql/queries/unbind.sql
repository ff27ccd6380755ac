SELECT {schema}.unbind($1, $2, b ->> 'pattern', b -> 'headers') FROM (SELECT $3::text::jsonb -> 0 AS b) AS one
