SELECT {schema}.resume_schedule($1, $2, $3)
