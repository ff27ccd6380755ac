-- What a failure leads to.

-- Whether a message that has failed p_attempts times before is dead after this outcome.
CREATE OR REPLACE FUNCTION is_final(p_outcome text, p_attempts int, p_max_attempts int) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_outcome = 'dead' OR p_outcome = 'retry' AND p_attempts + 1 >= p_max_attempts
$$;

CREATE OR REPLACE FUNCTION cut_text(p_text text, p_bytes int) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    cut text := left(p_text, p_bytes);
BEGIN
    WHILE octet_length(cut) > p_bytes LOOP
        -- At least so many characters have to go: none is longer than four bytes.
        cut := left(cut, -((octet_length(cut) - p_bytes + 3) / 4));
    END LOOP;
    RETURN cut;
END $$;

-- Error text as stored: at most 8 KiB, cut between characters.
CREATE OR REPLACE FUNCTION error_text(p_error text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN octet_length(p_error) <= 8192 THEN p_error ELSE cut_text(p_error, 8192) END
$$;

-- The delay before the next attempt, after p_attempts failed ones: full jitter below an exponential bound.
CREATE OR REPLACE FUNCTION retry_delay(g consumer_group, p_attempts int) RETURNS interval
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    base double precision := extract(epoch FROM g.backoff_base);
    cap  double precision := extract(epoch FROM g.backoff_cap);
BEGIN
    IF base <= 0 OR cap <= 0 THEN
        RETURN interval '0';
    END IF;
    -- Compared as logarithms: factor ^ attempts itself overflows.
    IF base < cap AND ln(g.backoff_factor) * (greatest(p_attempts, 1) - 1) < ln(cap / base) THEN
        cap := base * power(g.backoff_factor, greatest(p_attempts, 1) - 1);
    END IF;
    RETURN make_interval(secs => cap * random());
END $$;

-- A caller's own delay in seconds, as far as timestamps reach: NaN and negative ones mean now, ten years are the most.
CREATE OR REPLACE FUNCTION asked_delay(p_seconds double precision) RETURNS interval
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT make_interval(secs => CASE WHEN p_seconds = 'NaN' THEN 0 ELSE greatest(0, least(p_seconds, 315360000)) END)
$$;

-- The attempts of a message, newest last, the last twenty: when, what, why.
CREATE OR REPLACE FUNCTION add_history(p_history jsonb, p_attempt int, p_outcome text, p_error text) RETURNS jsonb
LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN jsonb_array_length(p_history) >= 20 THEN p_history - 0 ELSE p_history END
        || jsonb_build_object('at', clock_timestamp(), 'attempt', p_attempt, 'outcome', p_outcome, 'error', left(p_error, 500))
$$;
