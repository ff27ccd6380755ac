-- Producing messages that carry more than an INSERT can say: idempotency keys, delays, times to expire. What carries none is a plain INSERT
-- into message_log_<n>, and costs nothing of this.

-- Makes produce_<n>, which is called for each such batch and so keeps its plans (see generated.sql). It takes the columns of the batch as arrays of one
-- length (or empty: all NULL; delays are seconds, and what expires in so many seconds does so counted from when it is due) and returns one row per message, in order: its id, when it was written, whether it is
-- a duplicate, and then whether its payload differs from the one that is stored; whether it is delayed, so that the id is one of
-- message_delayed_<n>, and until when.
--
-- p_expected, in a compacted stream: the ids that the keys' current values have to have, see require_latest (current.sql). Not for messages that are
-- delayed or have idempotency keys.
--
-- witness_1 and witness_2, of a message that was delayed, are the hashes of a row of message_idempotency_<n> that was written in this
-- transaction, at written_at: the message itself may have gone into the log by the time that somebody asks what became of the commit
-- (commit.sql). It is the row of its key, or else one made for the purpose, under a key that nobody has.
--
-- Invariants:
--   * Whoever has a key's row in message_idempotency_<n> has its message: both are written in one transaction, the row first.
--   * The log is locked before an id is drawn: a writer without the lock would not be seen by the fence.
--   * Ids are drawn in the order of the batch, rows of keys are written in the order of their hashes: two batches of one
--     statement each never wait for each other in a circle.
-- Where the partition is missing that it needs, it makes it, in the same transaction: until that has ended, others who need one wait. Maintenance makes
-- them ahead, so that this is for a burst that outruns it.
-- A key that another open transaction has written is waited for: whether it is a duplicate only shows when that ends.
--
-- Keys are kept as two hashes of 64 bits. Collisions of keys that nobody made for the purpose do not occur.
-- Joins are look-ups per row, by LATERAL with LIMIT: on a table that was just filled the planner would rather read it all.
CREATE OR REPLACE FUNCTION make_produce_function(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $make$
DECLARE
    s stream := require_stream(p_stream);
BEGIN
    EXECUTE format(dollar_quoted($text$
        CREATE OR REPLACE FUNCTION %2$I(p_keys text[], p_routing_keys text[], p_headers text[], p_payloads %6$s[], p_idempotency_keys text[],
            p_deliver_at timestamptz[], p_delays float8[], p_expires_at timestamptz[], p_expires_in float8[], p_expected bigint[] DEFAULT '{}')
        RETURNS TABLE (id bigint, written_at timestamptz, duplicate boolean, differs boolean, deliver_at timestamptz, delayed boolean, witness_1 bigint, witness_2 bigint)
        LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET jit = off AS $$
        #variable_conflict use_column
        DECLARE
            begun   timestamptz := clock_timestamp();
            now     timestamptz;
            oldest  timestamptz;
            -- By the place in the batch: when it is due (NULL: now), the hashes of the key (NULL: no key), of the payload, the id that was
            -- drawn for it, and the id and the payload's hash that are stored under the key. Ids of delayed messages are negative here, and
            -- in message_idempotency_<n>.
            due     timestamptz[];
            expires timestamptz[];
            hashes1 bigint[];
            hashes2 bigint[];
            sums    bigint[];
            ids     bigint[];
            known   bigint[];
            stored  bigint[];
            wanted  bigint;
            made    bigint;
            rounds  int := 0;
            marker  uuid;
        BEGIN
            IF EXISTS (SELECT FROM unnest(ARRAY[cardinality(p_keys), cardinality(p_routing_keys), cardinality(p_headers), cardinality(p_idempotency_keys), cardinality(p_deliver_at),
                                                cardinality(p_delays), cardinality(p_expires_at), cardinality(p_expires_in), cardinality(p_expected)]) AS n WHERE n NOT IN (0, cardinality(p_payloads))) THEN
                PERFORM %1$I.require_that(false, 'the arrays of a batch are of one length, or empty', 'Give each message a place in each of them: NULL for none.');
            END IF;
            IF cardinality(p_expected) > 0 THEN
                PERFORM %1$I.require_latest(%5$s, p_keys, p_expected);
            END IF;
            LOCK TABLE ONLY %1$I.%3$I IN ROW EXCLUSIVE MODE;
            SELECT begun - s.idempotency_window INTO oldest FROM %1$I.stream AS s WHERE s.id = %5$s;
            SELECT array_agg(hashtextextended(u.k COLLATE "C", 0)), array_agg(hashtextextended(u.k COLLATE "C", 1)),
                   array_agg(CASE WHEN u.k IS NOT NULL THEN coalesce(hashtextextended(%7$s COLLATE "C", 0), 0) END)
                INTO hashes1, hashes2, sums FROM unnest(p_idempotency_keys, p_payloads) AS u(k, payload);
            due := ARRAY(SELECT CASE WHEN d.at > begun THEN d.at END
                         FROM (SELECT coalesce(u.at, begun + make_interval(secs => u.delay)) AS at FROM unnest(p_deliver_at, p_delays) AS u(at, delay)) AS d);
            expires := ARRAY(SELECT coalesce(u.at, coalesce(u.due, begun) + make_interval(secs => u.after)) FROM unnest(p_expires_at, p_expires_in, due) AS u(at, after, due));
            LOOP
                SELECT array_agg(x.message_id), array_agg(x.payload_hash) INTO known, stored
                FROM unnest(hashes1, hashes2) AS u(h1, h2)
                LEFT JOIN LATERAL (SELECT i.message_id, i.payload_hash FROM %1$I.%4$I AS i
                                   WHERE i.hash_1 = u.h1 AND i.hash_2 = u.h2 AND i.sent_at > oldest LIMIT 1) AS x ON true;
                -- Of each key that is not known the first, and in the first round all without a key.
                SELECT array_agg(CASE WHEN n.takes THEN coalesce(n.id, CASE WHEN n.due IS NULL THEN nextval(%8$L) ELSE -nextval(%10$L) END) ELSE n.id END), count(n.h1) FILTER (WHERE n.known IS NULL)
                    INTO ids, wanted
                FROM (SELECT u.id, u.due, u.h1, u.known, u.h1 IS NULL OR u.known IS NULL AND row_number() OVER (PARTITION BY u.h1, u.h2 ORDER BY u.n) = 1 AS takes
                      FROM unnest(ids, due, hashes1, hashes2, known) WITH ORDINALITY AS u(id, due, h1, h2, known, n) ORDER BY u.n) AS n;
                EXIT WHEN wanted = 0;
                -- One that has outlived the window makes place. One that was written meanwhile stays.
                INSERT INTO %1$I.%4$I AS i (hash_1, hash_2, message_id, payload_hash, sent_at)
                SELECT u.h1, u.h2, u.id, u.sum, begun FROM unnest(hashes1, hashes2, ids, sums, known) AS u(h1, h2, id, sum, known)
                WHERE u.h1 IS NOT NULL AND u.id IS NOT NULL AND u.known IS NULL ORDER BY u.h1, u.h2
                ON CONFLICT (hash_1, hash_2) DO UPDATE SET message_id = EXCLUDED.message_id, payload_hash = EXCLUDED.payload_hash, sent_at = EXCLUDED.sent_at
                    WHERE i.sent_at <= oldest;
                GET DIAGNOSTICS made = ROW_COUNT;
                IF made = wanted THEN
                    SELECT array_agg(coalesce(u.known, u.id)) INTO known FROM unnest(known, ids) AS u(known, id);
                    EXIT;
                END IF;
                -- Somebody was faster, or the batch has a key twice: look again, in a later statement, which sees them.
                rounds := rounds + 1;
                IF rounds > 100 THEN
                    RAISE EXCEPTION 'rows of message_idempotency_%5$s go as fast as they come' USING ERRCODE = 'serialization_failure', HINT = 'Send the messages again.';
                END IF;
            END LOOP;

            IF cardinality(due) > 0 THEN
                INSERT INTO %1$I.%9$I (deliver_at, id, key, routing_key, headers, sent_at, expires_at, payload) OVERRIDING SYSTEM VALUE
                SELECT u.due, -u.id, u.key, u.routing_key, u.headers::jsonb, begun, u.expires, u.payload
                FROM unnest(ids, hashes1, known, due, expires, p_keys, p_routing_keys, p_headers, p_payloads) AS u(id, h1, known, due, expires, key, routing_key, headers, payload)
                WHERE u.id < 0 AND (u.h1 IS NULL OR u.id = u.known);
                IF EXISTS (SELECT FROM unnest(ids, hashes1) AS u(id, h1) WHERE u.id < 0 AND u.h1 IS NULL) THEN
                    marker := gen_random_uuid();
                    INSERT INTO %1$I.%4$I (hash_1, hash_2, message_id, payload_hash, sent_at)
                    VALUES (hashtextextended(marker::text, 0), hashtextextended(marker::text, 1), 0, 0, begun);
                END IF;
            END IF;
            SELECT max(u.id) INTO wanted FROM unnest(ids) AS u(id);
            rounds := 0;
            -- Each round waits for up to a second, where somebody makes it, or keeps everybody from it.
            WHILE wanted > 0 AND rounds < 60 AND to_regclass(%11$L || wanted / %12$s) IS NULL LOOP
                PERFORM %1$I.ensure_partitions(%5$s);
                rounds := rounds + 1;
            END LOOP;
            now := clock_timestamp();
            INSERT INTO %1$I.%3$I (id, key, routing_key, headers, produced_at, expires_at, payload) OVERRIDING SYSTEM VALUE
            SELECT u.id, u.key, u.routing_key, u.headers::jsonb, now, u.expires, u.payload
            FROM unnest(ids, hashes1, known, expires, p_keys, p_routing_keys, p_headers, p_payloads) AS u(id, h1, known, expires, key, routing_key, headers, payload)
            WHERE u.id > 0 AND (u.h1 IS NULL OR u.id = u.known);
            RETURN QUERY
            SELECT abs(x.id), CASE WHEN x.id < 0 THEN begun ELSE now END, x.duplicate, x.differs, x.due, x.id < 0,
                   CASE WHEN x.id < 0 THEN coalesce(x.h1, hashtextextended(marker::text, 0)) END, CASE WHEN x.id < 0 THEN coalesce(x.h2, hashtextextended(marker::text, 1)) END
            FROM (SELECT coalesce(u.known, u.id) AS id, u.h1 IS NOT NULL AND u.id IS DISTINCT FROM u.known AS duplicate, coalesce(u.stored <> u.sum, false) AS differs,
                         u.due, u.h1, u.h2
                  FROM unnest(ids, hashes1, hashes2, known, stored, sums, due) AS u(id, h1, h2, known, stored, sum, due)) AS x;
        END $$
        $text$), current_schema(), 'produce_' || p_stream, 'message_log_' || p_stream, 'message_idempotency_' || p_stream, p_stream, s.payload_type,
        CASE s.payload_type WHEN 'bytea' THEN 'encode(u.payload, ''hex'')' ELSE 'u.payload::text' END, format('%I.%I', current_schema(), 'message_log_' || p_stream || '_id_seq'),
        'message_delayed_' || p_stream, format('%I.%I', current_schema(), 'message_delayed_' || p_stream || '_id_seq'),
        format('%I.%I', current_schema(), 'message_log_' || p_stream || '_p'), s.partition_size);
END $make$;

-- Sends one message, for people and programs that speak SQL: the payload in its text form, whatever the stream stores. Returns the message's id, whether
-- it is delayed, so that the id is one for cancel_delayed, whether a message with its idempotency key was there before, and then whether that has another payload.
CREATE OR REPLACE FUNCTION produce(p_stream text, p_payload text, p_key text DEFAULT NULL, p_routing_key text DEFAULT NULL, p_headers jsonb DEFAULT NULL,
    p_idempotency_key text DEFAULT NULL, p_delay interval DEFAULT NULL, p_deliver_at timestamptz DEFAULT NULL,
    p_expires_in interval DEFAULT NULL, p_expires_at timestamptz DEFAULT NULL, p_expect_latest bigint DEFAULT NULL)
RETURNS TABLE (id bigint, delayed boolean, duplicate boolean, differs boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    s stream;
BEGIN
    SELECT * INTO s FROM stream WHERE name = p_stream;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no stream %', quote_ident(p_stream)
            USING ERRCODE = 'SQ001', HINT = 'Table stream lists those that exist.';
    END IF;
    IF p_idempotency_key = '' OR octet_length(p_idempotency_key) > 1024 THEN
        RAISE EXCEPTION 'an idempotency key takes 1 to 1024 bytes, this one has %', octet_length(p_idempotency_key)
            USING ERRCODE = 'SQ004', HINT = 'Choose a shorter one, or one that is not empty.';
    END IF;
    PERFORM require_message(s, p_payload, p_key, p_routing_key, p_headers);
    PERFORM require_that(p_delay IS NULL OR p_deliver_at IS NULL, 'a message is due after a delay or at a time, not both', 'Give one of the two.');
    PERFORM require_that(p_expires_in IS NULL OR p_expires_at IS NULL, 'a message expires after a time or at a time, not both', 'Give one of the two.');
    PERFORM require_that(coalesce(p_delay, '0') BETWEEN '0' AND '200000 years' AND coalesce(p_expires_in, '0') BETWEEN '0' AND '200000 years',
                         'a delay, and a time to expire, is 0 to 200000 years long', 'Leave it out for none.');
    PERFORM require_that(coalesce(p_deliver_at, '-infinity') < 'infinity', 'a message that is due at infinity would never be delivered', 'Give the time at which it is to be.');
    IF p_expect_latest IS NOT NULL AND (p_idempotency_key IS NOT NULL OR p_delay IS NOT NULL OR p_deliver_at IS NOT NULL) THEN
        RAISE EXCEPTION 'a message that expects what is latest is neither delayed nor has it an idempotency key'
            USING ERRCODE = 'SQ004', HINT = 'Sent twice, it is refused the second time.';
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT p.id, p.delayed, p.duplicate, p.differs FROM %I(ARRAY[$1], ARRAY[$2], ARRAY[$3], ARRAY[$4::%s], ARRAY[$5], ARRAY[$6], ARRAY[$7], ARRAY[$8], ARRAY[$9], CASE WHEN $10 IS NULL THEN ''{}'' ELSE ARRAY[$10] END) AS p',
        'produce_' || s.id, s.payload_type)
        USING p_key, p_routing_key, p_headers::text, p_payload, p_idempotency_key,
              p_deliver_at, extract(epoch FROM p_delay)::float8, p_expires_at, extract(epoch FROM p_expires_in)::float8, p_expect_latest;
END $$;

-- Removes keys that have outlived the stream's window, the oldest first, at most p_limit. p_from bounds the look from below: where it
-- ended the last time, so that rows which are dead and cannot be removed yet are not read again and again. Returns how many were removed, and
-- from where on to go on; nothing while another does the same.
--
-- Rows that are locked are passed over, so that it waits for nobody.
CREATE OR REPLACE FUNCTION expire_idempotency_keys(p_stream bigint, p_from timestamptz DEFAULT '-infinity', p_limit bigint DEFAULT 10000) RETURNS TABLE (removed bigint, upto timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    s      stream := require_stream(p_stream);
    oldest timestamptz := clock_timestamp() - s.idempotency_window;
BEGIN
    PERFORM require_limit(p_limit);
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sqlstreams expire keys ' || current_schema(), p_stream)) THEN
        RETURN;
    END IF;
    EXECUTE format(
        'WITH old AS MATERIALIZED (SELECT hash_1, hash_2, sent_at FROM %1$I WHERE sent_at >= $1 AND sent_at <= $2 ORDER BY sent_at LIMIT $3 FOR UPDATE SKIP LOCKED),
              gone AS (DELETE FROM %1$I AS i USING old WHERE i.hash_1 = old.hash_1 AND i.hash_2 = old.hash_2 RETURNING i.sent_at)
         SELECT count(*), max(sent_at) FROM gone', 'message_idempotency_' || p_stream)
        INTO removed, upto USING p_from, oldest, p_limit;
    upto := coalesce(upto, p_from);
    RETURN NEXT;
END $$;

-- Maintenance: the same, for streams to which nobody sends with keys any more.

-- Only those that have, or had, keys at all.
CREATE OR REPLACE FUNCTION keys_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT h.stream_id, interval '0' FROM unnest(p_heads) AS h
    WHERE pg_relation_size(to_regclass(format('%I.%I', current_schema(), 'message_idempotency_' || h.stream_id))) > 0;
END $$;

-- How long until the next key of a stream has outlived its window, as of its oldest after p_from: at least a minute, and at most an hour, since the window may be changed.
CREATE OR REPLACE FUNCTION next_expiry_of_keys(p_stream bigint, p_from timestamptz DEFAULT '-infinity') RETURNS interval
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    s      stream := require_stream(p_stream);
    oldest timestamptz;
BEGIN
    EXECUTE format('SELECT sent_at FROM %I WHERE sent_at >= $1 ORDER BY sent_at LIMIT 1', 'message_idempotency_' || p_stream) INTO oldest USING p_from;
    RETURN least(greatest(coalesce(oldest, clock_timestamp()) + s.idempotency_window - clock_timestamp(), '1 minute'), '1 hour');
END $$;
