-- Wake-ups. They are hints: whoever gets none finds the messages by polling.

-- The channel of this installation. By number: a name may be longer than a channel's may.
CREATE OR REPLACE FUNCTION ring_channel() RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT 'sqlstreams_' || (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
$$;

-- Tells the consumers of these streams that there is something to do, when the transaction commits. Not while the server's queue
-- of notifications fills up, since some session listens and does not read: a full one would make the commit fail.
CREATE OR REPLACE FUNCTION ring(p_streams bigint[]) RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT pg_notify(ring_channel(), s::text) FROM unnest(p_streams) AS s WHERE (SELECT pg_notification_queue_usage()) < 0.5
$$;

-- For streams that say so: every INSERT rings. Repeated within a transaction it rings once.
CREATE OR REPLACE FUNCTION ring_on_insert() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM ring(ARRAY[TG_ARGV[0]::bigint]);
    RETURN NULL;
END $$;
