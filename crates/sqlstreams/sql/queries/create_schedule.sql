-- Durations travel as seconds; NULL is the default.
SELECT {schema}.create_schedule($1, $2, $3, $4, $5, $6, $7, make_interval(secs => $8), $9::int, $10, $11, $12::text::jsonb, make_interval(secs => $13), $14, $15, $16)
