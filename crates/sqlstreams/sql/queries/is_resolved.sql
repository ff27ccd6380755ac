SELECT {schema}.is_resolved($1, $2, $3)
