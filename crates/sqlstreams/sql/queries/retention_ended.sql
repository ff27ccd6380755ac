SELECT extract(epoch FROM {schema}.retention_ended($1, $2, $3, $4, $5))::float8
