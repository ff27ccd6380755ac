SELECT {schema}.release_maintenance($1)
