-- Durations travel as seconds; NULL leaves a part as it is.
SELECT {schema}.alter_schedule($1, $2, $3, $4, $5, make_interval(secs => $6), $7::int, $8, $9, $10, $11::text::jsonb, make_interval(secs => $12), $13, $14, $15)
