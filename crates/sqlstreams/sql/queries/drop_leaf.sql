SELECT {schema}.drop_leaf($1, $2)
