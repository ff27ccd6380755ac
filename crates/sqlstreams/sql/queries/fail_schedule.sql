SELECT {schema}.fail_schedule($1, $2, $3)
