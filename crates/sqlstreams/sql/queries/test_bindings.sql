-- The binding as an array of one; NULL for a group that has none.
SELECT consumer_group, CASE WHEN pattern IS NOT NULL OR headers IS NOT NULL
                            THEN jsonb_build_array(jsonb_build_object('pattern', pattern, 'headers', headers))::text END
FROM {schema}.test_bindings($1, $2, $3::text::jsonb)
