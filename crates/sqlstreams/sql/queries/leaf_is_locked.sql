SELECT {schema}.leaf_is_locked($1)
