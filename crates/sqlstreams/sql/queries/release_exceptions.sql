SELECT {schema}.release_exceptions($1, $2, $3, $4)
