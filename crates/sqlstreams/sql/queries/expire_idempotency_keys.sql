SELECT removed, upto FROM {schema}.expire_idempotency_keys($1, coalesce($2, '-infinity'), $3)
