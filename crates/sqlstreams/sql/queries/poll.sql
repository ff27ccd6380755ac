SELECT fresh, lapsed, due, suspect FROM {schema}.poll($1, $2, coalesce($3, '-infinity'))
