-- Functions of version 1 whose arguments or results are others now; what calls them by the arguments that they had finds the new ones.

-- The view keeps its place, and whoever may read it may do so afterwards, while the function that it shows is made anew.
DO $$
DECLARE
    columns text;
BEGIN
    SELECT string_agg(format('NULL::%s AS %I', format_type(atttypid, atttypmod), attname), ', ' ORDER BY attnum) INTO columns
        FROM pg_attribute WHERE attrelid = to_regclass('consumer_group_cursor') AND attnum > 0;
    IF columns IS NOT NULL THEN
        EXECUTE 'CREATE OR REPLACE VIEW consumer_group_cursor AS SELECT ' || columns || ' WHERE false';
    END IF;
END $$;

DROP FUNCTION IF EXISTS alter_stream(bigint, boolean, interval);
DROP FUNCTION IF EXISTS binding_condition(bigint, bigint, bigint);
DROP FUNCTION IF EXISTS claim_range(bigint, consumer_group, bigint, uuid, bigint, lane_wish, group_cursor);
DROP FUNCTION IF EXISTS create_partition(bigint, bigint, bigint, boolean);
DROP FUNCTION IF EXISTS create_stream(text, text, bigint, boolean, interval, boolean);
DROP FUNCTION IF EXISTS ensure_partitions(bigint, int);
DROP FUNCTION IF EXISTS find_lease(bigint, bigint, uuid);
DROP FUNCTION IF EXISTS keep_matching(bigint, consumer_group, bigint, boolean, bigint, bigint, group_cursor, int8multirange);
DROP FUNCTION IF EXISTS list_cursors(text, text);
DROP FUNCTION IF EXISTS make_suspects(bigint, consumer_group, int8multirange, bigint);
DROP FUNCTION IF EXISTS next_in_turn(bigint, lane_wish, bigint, group_cursor);
DROP FUNCTION IF EXISTS next_range(bigint, bigint, group_cursor);
DROP FUNCTION IF EXISTS take_over(bigint, consumer_group, bigint, uuid, bigint, lane_wish, group_cursor);
