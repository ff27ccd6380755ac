-- Exports that go on where the last one ended: the cursor of a group remembers, and keeps from being dropped what was not exported yet.

-- Moves the cursor of a group from p_from, where it has to stand, to p_upto, as if everything between had been handled. For groups that nobody
-- consumes: refused (SQ014) where anything was handed out or waits, and where the cursor stands elsewhere: somebody else has moved it.
-- p_upto has to be final, which is what read_log tells.
CREATE OR REPLACE FUNCTION move_cursor(p_stream bigint, p_group bigint, p_from bigint, p_upto bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c    group_cursor;
    g    consumer_group;
    open boolean;
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    g := require_group(p_stream, p_group);
    PERFORM require_that(g.mode = 'parallel',
                         format('group %s is %s, and only a parallel one remembers how far an export has come', quote_ident(g.name), g.mode),
                         'An export takes a group of its own, which nobody consumes.');
    PERFORM require_that(p_upto BETWEEN p_from AND greatest(log_head(p_stream), p_from),
                         format('%s is not between %s and the head of the stream', p_upto, p_from),
                         'Read the log as far as it is final.');
    EXECUTE format('SELECT EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND seq >= $2)
                        OR EXISTS (SELECT FROM %2$I WHERE group_id = $1 AND state = ''ready'')
                        OR EXISTS (SELECT FROM %2$I WHERE group_id = $1 AND state = ''inflight'')',
                   'consumer_lease_' || p_stream, 'exception_queue_' || p_stream)
        INTO open USING p_group, c.first_open;
    IF open THEN
        RAISE EXCEPTION 'group % has messages that are handed out or wait for another attempt', quote_ident(g.name)
            USING ERRCODE = 'SQ014', HINT = 'An export takes a group of its own, which nobody consumes.';
    END IF;
    IF c.claimed <> p_from THEN
        RAISE EXCEPTION 'group % stands at %, not at %', quote_ident(g.name), c.claimed, p_from
            USING ERRCODE = 'SQ014', HINT = 'Somebody else has moved it: an export takes a group of its own, one at a time.';
    END IF;
    c.claimed := p_upto;
    PERFORM save_cursor(p_stream, p_group, c);
END $$;
