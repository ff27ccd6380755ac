SELECT {schema}.run_schedule($1)
