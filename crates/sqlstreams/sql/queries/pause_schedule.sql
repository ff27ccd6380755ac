SELECT {schema}.pause_schedule($1)
