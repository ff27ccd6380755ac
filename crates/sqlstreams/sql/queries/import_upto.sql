SELECT {schema}.import_upto($1, $2)
