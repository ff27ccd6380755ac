SELECT held FROM {schema}.hold_maintenance($1, $2, make_interval(secs => $3))
