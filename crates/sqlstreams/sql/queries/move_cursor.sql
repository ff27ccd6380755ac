SELECT {schema}.move_cursor($1, $2, $3, $4)
