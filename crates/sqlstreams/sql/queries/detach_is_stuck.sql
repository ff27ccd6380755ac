SELECT {schema}.detach_is_stuck($1)
