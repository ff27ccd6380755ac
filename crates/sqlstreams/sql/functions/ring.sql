-- Wake-ups. They are hints: whoever gets none finds the messages by polling.

-- The channel of this installation. By number: a name may be longer than a channel's may.
CREATE OR REPLACE FUNCTION ring_channel() RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT 'sqlstreams_' || (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
$$;

-- Tells the consumers of these streams that there is something to do, when the transaction commits.
CREATE OR REPLACE FUNCTION ring(p_streams bigint[]) RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT pg_notify(ring_channel(), s::text) FROM unnest(p_streams) AS s
$$;

-- For streams that say so: every INSERT rings. Repeated within a transaction it rings once.
CREATE OR REPLACE FUNCTION ring_on_insert() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM ring(ARRAY[TG_ARGV[0]::bigint]);
    RETURN NULL;
END $$;
