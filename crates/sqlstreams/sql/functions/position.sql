-- Finding a place in the log by time.
--
-- A row draws its id and reads the clock in one go, but many sessions do so at once, so neighbours may be swapped. What is assumed is that they are so
-- by no more than clock_margin(): that a message was not produced earlier, by more than that, than one with a lower id. Then two binary searches, for a
-- little before and a little after a time, find ids between which the time lies, and what lies between those is read. It does not hold where
-- the server's clock was set back by more: there a search ends at one of the places where the clock showed that time.

CREATE OR REPLACE FUNCTION clock_margin() RETURNS interval
LANGUAGE sql IMMUTABLE AS $$ SELECT interval '5 seconds' $$;

-- The lowest id that the log of a stream may have: what was below it has been removed by retention.
CREATE OR REPLACE FUNCTION lowest_id(p_stream bigint) RETURNS bigint
LANGUAGE sql VOLATILE AS $$ SELECT first_id FROM stream WHERE id = p_stream $$;

-- The first message with p_from <= id < p_to. By growing windows: an unbounded look-up would plan for every partition there is, and a run of
-- empty ones is passed over in few steps.
CREATE OR REPLACE FUNCTION first_message(p_stream bigint, p_size bigint, p_from bigint, p_to bigint, OUT id bigint, OUT produced_at timestamptz)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    at    bigint := p_from;
    width bigint := p_size;
    found record;
BEGIN
    WHILE at < p_to LOOP
        EXECUTE format('SELECT id, produced_at FROM %I WHERE id >= $1 AND id < $2 ORDER BY id LIMIT 1', 'message_log_' || p_stream)
            INTO found USING at, least(at + width, p_to);
        IF found.id IS NOT NULL THEN
            id := found.id;
            produced_at := found.produced_at;
            RETURN;
        END IF;
        at := at + width;
        width := width * 4;
    END LOOP;
END $$;

-- Two ids next to each other in the log: lower is of a message older than p_at (or the one before the lowest that the log may have), and the first
-- message from upper on is not older, if there is one.
CREATE OR REPLACE FUNCTION bisect_log(p_stream bigint, p_at timestamptz, OUT lower bigint, OUT upper bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s    stream := require_stream(p_stream);
    mid  bigint;
    seen record;
BEGIN
    lower := s.first_id - 1;
    upper := log_head(p_stream) + 1;
    WHILE upper - lower > 1 LOOP
        mid := lower + (upper - lower) / 2;
        SELECT * INTO seen FROM first_message(p_stream, s.partition_size, mid, upper);
        IF seen.id IS NULL OR seen.produced_at >= p_at THEN
            upper := mid;
        ELSE
            lower := seen.id;
        END IF;
    END LOOP;
END $$;

-- The lowest id of a message produced at or after p_at (none: the one after the last message), and the highest of one produced before it (none: the
-- one before the lowest that the log may have). An id that is missing while somebody writes to the log may be of a message that is not committed yet:
-- first_from does not lie beyond one in the margin. Where more than a million ids lie in the margin, they are not read, and both are on the safe
-- side: first_from too low, last_before too high.
CREATE OR REPLACE FUNCTION time_edge(p_stream bigint, p_at timestamptz, OUT first_from bigint, OUT last_before bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    -- Everything up to here is older, and nothing from there on.
    below bigint := (SELECT lower FROM bisect_log(p_stream, p_at - clock_margin()));
    above bigint := (SELECT upper FROM bisect_log(p_stream, p_at + clock_margin()));
    -- Before the rows are read: what a writer that has ended meanwhile has written is seen.
    open  boolean := cardinality(log_writers(p_stream)) > 0;
    whole bigint;
BEGIN
    first_from := below + 1;
    last_before := above - 1;
    IF above - below <= 1000000 THEN
        EXECUTE format('SELECT id FROM %I WHERE id > $1 AND id < $2 AND produced_at >= $3 ORDER BY id LIMIT 1', 'message_log_' || p_stream)
            INTO first_from USING below, above, p_at;
        EXECUTE format('SELECT id FROM %I WHERE id > $1 AND id < $2 AND produced_at < $3 ORDER BY id DESC LIMIT 1', 'message_log_' || p_stream)
            INTO last_before USING below, above, p_at;
        first_from := coalesce(first_from, above);
        IF open THEN
            EXECUTE format('SELECT max(id) FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM %I WHERE id > $1 AND id < $2) AS x WHERE id = $1 + n', 'message_log_' || p_stream)
                INTO whole USING below, first_from;
            first_from := coalesce(whole, below) + 1;
        END IF;
        last_before := coalesce(last_before, below);
    END IF;
END $$;

-- A few minutes are a client's clock; more is a mistake, and would pass over what is produced until then.
CREATE OR REPLACE FUNCTION require_past(p_at timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF p_at > clock_timestamp() + interval '5 minutes' AND p_at < 'infinity' THEN
        RAISE EXCEPTION 'the time % lies in the future', p_at
            USING ERRCODE = 'SQ004', HINT = 'Start at the latest message, or at a time that has been.';
    END IF;
END $$;

-- The position just before the first message produced at or after p_at, which must not lie in the future.
CREATE OR REPLACE FUNCTION position_at(p_stream bigint, p_at timestamptz) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
BEGIN
    PERFORM require_past(p_at);
    RETURN (SELECT first_from - 1 FROM time_edge(p_stream, p_at));
END $$;
