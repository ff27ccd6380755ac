SELECT {schema}.drop_schedule($1)
