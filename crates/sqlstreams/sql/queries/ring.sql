SELECT {schema}.ring($1)
