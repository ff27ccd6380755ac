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

-- They go by another name first: a call that is running has them by their number, and fails where one is gone. The last step of the migration drops them.
DO $$
DECLARE
    f text;
BEGIN
    FOREACH f IN ARRAY ARRAY[
        'alter_stream(bigint, boolean, interval)',
        'binding_condition(bigint, bigint, bigint)',
        'claim_range(bigint, consumer_group, bigint, uuid, bigint, lane_wish, group_cursor)',
        'create_partition(bigint, bigint, bigint, boolean)',
        'create_stream(text, text, bigint, boolean, interval, boolean)',
        'ensure_partitions(bigint, int)',
        'find_lease(bigint, bigint, uuid)',
        'keep_matching(bigint, consumer_group, bigint, boolean, bigint, bigint, group_cursor, int8multirange)',
        'list_cursors(text, text)',
        'make_suspects(bigint, consumer_group, int8multirange, bigint)',
        'next_in_turn(bigint, lane_wish, bigint, group_cursor)',
        'next_range(bigint, bigint, group_cursor)',
        'take_over(bigint, consumer_group, bigint, uuid, bigint, lane_wish, group_cursor)']
    LOOP
        -- (One of that name may have stayed, since something of somebody's is made of it.)
        IF to_regprocedure(f) IS NOT NULL THEN
            EXECUTE format('ALTER FUNCTION %s RENAME TO %I', to_regprocedure(f), 'replaced_' || split_part(f, '(', 1));
        END IF;
    END LOOP;
END $$;

-- From here on whoever sets bindings says so. (Not with the column: functions of version 1 have set some since.)
UPDATE consumer_group AS g SET binding_version = b.version FROM (SELECT group_id, max(version) AS version FROM binding_set GROUP BY group_id) AS b WHERE b.group_id = g.id;
