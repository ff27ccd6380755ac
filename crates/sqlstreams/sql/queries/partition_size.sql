-- What a partition takes, and in which file: VACUUM (FULL) writes a new one.
SELECT pg_table_size($1::text::regclass), pg_relation_filenode($1::text::regclass)::bigint
