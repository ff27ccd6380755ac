SELECT {schema}.release_lanes($1, $2, $3)
