SELECT {schema}.expire_owner($1, $2, $3)
