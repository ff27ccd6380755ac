-- Durations travel as seconds; NULL keeps the default.
SELECT {schema}.create_group($1, $2, $3, make_interval(secs => $4), $5, make_interval(secs => $6), $7, make_interval(secs => $8), $9, $10,
                             p_bindings => $11::text::jsonb, p_mode => $12, p_newest_only => $13)
