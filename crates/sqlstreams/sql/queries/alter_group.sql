-- Durations travel as seconds; NULL keeps what is.
SELECT {schema}.alter_group($1, $2, make_interval(secs => $3), $4, make_interval(secs => $5), $6, make_interval(secs => $7), $8, $9, $10, $11)
