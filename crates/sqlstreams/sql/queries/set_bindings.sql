SELECT {schema}.set_bindings($1, $2, $3::text::jsonb)
