-- Durations travel as seconds; NULL keeps what is, 0 lifts a limit of retention.
SELECT {schema}.alter_stream($1, $2, make_interval(secs => $3), make_interval(secs => $4), $5, $6, $7, $8, make_interval(secs => $9))
