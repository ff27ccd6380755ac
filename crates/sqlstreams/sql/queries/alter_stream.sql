SELECT {schema}.alter_stream($1, $2)
