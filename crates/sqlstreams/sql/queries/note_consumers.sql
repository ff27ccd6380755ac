SELECT {schema}.note_consumers($1)
