-- Functions that are made for each stream, with its tables named in their text: unlike EXECUTE, that keeps their plans. For
-- what is called once per message. They are made anew with all functions.

CREATE OR REPLACE FUNCTION make_stream_functions(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $make$
BEGIN
    -- settle_in_transaction for one message of a lease, which is nearly every handler's. The usual case is told from here;
    -- whatever is not is looked at closely: p_seq is where the lease lies, unless it was moved (extend). Names are qualified, since setting a search_path has its cost, too.
    EXECUTE format(dollar_quoted($text$
        CREATE OR REPLACE FUNCTION %2$I(p_group bigint, p_seq bigint, p_token uuid, p_id bigint, p_mark text DEFAULT NULL) RETURNS void
        LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
        BEGIN
            -- Before anything is written: where the handler has ended the transaction, that would be committed by itself.
            IF current_setting('transaction_isolation') <> 'read committed' OR current_setting('sqlstreams.transaction', true) IS DISTINCT FROM p_mark THEN
                PERFORM %1$I.require_lent(p_mark);
            END IF;
            INSERT INTO %1$I.%3$I (group_id, message_id) VALUES (p_group, p_id) ON CONFLICT DO NOTHING;
            IF NOT FOUND THEN
                PERFORM %1$I.refuse_settled(1);
            END IF;
            IF NOT EXISTS (SELECT FROM %1$I.%4$I WHERE group_id = p_group AND seq = p_seq AND token = p_token AND pending @> p_id) THEN
                PERFORM %1$I.require_held(%5$L, p_group, p_token, ARRAY[p_id]);
            END IF;
        END $$
        $text$), current_schema(), 'settle_message_' || p_stream, 'consumer_done_' || p_stream, 'consumer_lease_' || p_stream, p_stream);
    PERFORM make_produce_function(p_stream);
    PERFORM make_current_functions(p_stream);
    PERFORM note_digests(p_stream);
END $make$;

-- Whoever replaces one of them by hand leaves the comment as it is, by which the doctor sees it.
CREATE OR REPLACE FUNCTION note_digests(p_stream bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    f record;
BEGIN
    FOR f IN SELECT x.oid::regprocedure AS name, function_digest(x.oid) AS digest FROM unnest(stream_functions(p_stream)) AS x(oid) LOOP
        EXECUTE format('COMMENT ON FUNCTION %s IS %L', f.name, f.digest);
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION drop_stream_functions(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('DROP FUNCTION IF EXISTS %I, %I, %I, %I', 'settle_message_' || p_stream, 'produce_' || p_stream, 'latest_message_' || p_stream, 'current_messages_' || p_stream);
END $$;

DO $$
BEGIN
    PERFORM make_stream_functions(id) FROM stream;
END $$;
