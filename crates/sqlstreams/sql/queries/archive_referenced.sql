SELECT finished FROM {schema}.archive_referenced($1, $2)
