SELECT {schema}.resume_group($1, $2)
