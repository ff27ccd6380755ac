SELECT extract(epoch FROM {schema}.next_expiry_of_keys($1, coalesce($2, '-infinity')))::float8
