SELECT {schema}.current_bindings($1, $2)::text
