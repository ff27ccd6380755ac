SELECT removed, upto, extract(epoch FROM next_due)::float8 FROM {schema}.expire_dead_letters($1, coalesce($2, '-infinity'), $3)
