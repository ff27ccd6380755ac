SELECT {schema}.expire_groups_after($1, make_interval(secs => $2))
