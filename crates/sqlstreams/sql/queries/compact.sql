SELECT looked_at, removed, upto, floor, busy FROM {schema}.compact($1, $2, 10000, make_interval(secs => $3), make_interval(secs => $4))
