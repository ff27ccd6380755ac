SELECT removed, upto FROM {schema}.tidy_archive($1, $2)
