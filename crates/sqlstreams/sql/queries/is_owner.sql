SELECT {schema}.is_owner($1, $2)
