SELECT {schema}.release_claim($1, $2, $3)
