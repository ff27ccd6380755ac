SELECT version, after_id, bindings::text, changed_at, changed_by FROM {schema}.list_binding_sets($1, $2)
