-- One binding travels as an array of one, like many do.
SELECT {schema}.bind($1, $2, b ->> 'pattern', b -> 'headers') FROM (SELECT $3::text::jsonb -> 0 AS b) AS one
