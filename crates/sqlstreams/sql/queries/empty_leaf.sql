SELECT {schema}.empty_leaf($1, $2)
