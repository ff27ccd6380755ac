SELECT id, written_at, duplicate, differs FROM {schema}.produce_{stream}($1, $2, $3, $5, $4)
