-- Bindings: what of a stream is for a group. A binding is a pattern over routing keys, conditions on headers, or both:
--     {"pattern": "orders.*.created", "headers": {"region": "eu"}}
-- A routing key is words with dots between them; * stands for exactly one word, # for any number of them, none included.
-- Headers have to hold all that the condition holds (headers @> condition). A message is for the group if any binding
-- matches, or if there is none. A message without a routing key, or with an empty one, has no word: only # matches it.
--
-- A set of bindings is compiled into one SQL condition over the log's columns. Everything a user wrote is quoted in it
-- by %L, and escaped where it is part of a regular expression.

CREATE OR REPLACE FUNCTION refuse_binding(p_what text, p_hint text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION '%', p_what USING ERRCODE = 'SQ020', HINT = p_hint;
END $$;

-- The normal form of a pattern; refuses what is none. Of wildcards in a row only the number of * counts, and whether there is
-- a #: #.# is #, and #.*.# is *.#.
CREATE OR REPLACE FUNCTION normal_pattern(p_pattern text) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
    shown  text := quote_literal(cut_text(p_pattern, 80));
    words  text[] := string_to_array(p_pattern, '.');
    word   text;
    normal text[] := '{}';
    hash   boolean := false;
BEGIN
    IF p_pattern = '' THEN
        PERFORM refuse_binding('a pattern is empty', 'Write # for every message.');
    ELSIF octet_length(p_pattern) > 255 THEN
        PERFORM refuse_binding(format('pattern %s… has %s bytes, more than 255', shown, octet_length(p_pattern)), 'No routing key is longer than 255 bytes.');
    ELSIF cardinality(words) > 32 THEN
        PERFORM refuse_binding(format('pattern %s has %s words, more than 32', shown, cardinality(words)), 'Use # for any number of words.');
    END IF;
    FOREACH word IN ARRAY words LOOP
        IF word = '' THEN
            PERFORM refuse_binding(format('pattern %s has an empty word', shown), 'Words stand between single dots: orders.eu.created.');
        ELSIF word ~ '[*#]' AND word NOT IN ('*', '#') THEN
            PERFORM refuse_binding(format('pattern %s has a wildcard within the word %s', shown, quote_literal(word)),
                                   '* and # are words of their own: orders.*.created, orders.#. What starts with some letters cannot be said.');
        END IF;
        IF word = '#' THEN
            hash := true;
            CONTINUE;
        END IF;
        IF hash AND word <> '*' THEN
            normal := array_append(normal, '#');
            hash := false;
        END IF;
        normal := array_append(normal, word);
    END LOOP;
    IF hash THEN
        normal := array_append(normal, '#');
    END IF;
    RETURN array_to_string(normal, '.');
END $$;

-- The normal form of a set of bindings: objects, sorted, each once. A string stands for a pattern. Refuses what is none.
CREATE OR REPLACE FUNCTION normal_bindings(p_bindings jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    b       jsonb;
    pattern text;
    headers jsonb;
    normal  jsonb := '[]';
BEGIN
    IF jsonb_typeof(p_bindings) IS DISTINCT FROM 'array' THEN
        PERFORM refuse_binding('bindings are an array', 'Write ["orders.*.created", {"headers": {"region": "eu"}}]; [] for none.');
    END IF;
    FOR b IN SELECT * FROM jsonb_array_elements(p_bindings) LOOP
        IF jsonb_typeof(b) = 'string' THEN
            b := jsonb_build_object('pattern', b);
        END IF;
        IF jsonb_typeof(b) <> 'object' THEN
            PERFORM refuse_binding(format('%s is no binding', cut_text(b::text, 80)), 'A binding is a pattern or an object with "pattern", "headers" or both.');
        END IF;
        IF b - '{pattern,headers}'::text[] <> '{}' THEN
            PERFORM refuse_binding(format('a binding has no %s', (SELECT quote_literal(cut_text(k, 80)) FROM jsonb_object_keys(b - '{pattern,headers}'::text[]) AS k LIMIT 1)),
                                   'It has "pattern", "headers" or both.');
        END IF;
        IF jsonb_typeof(b -> 'pattern') NOT IN ('string', 'null') THEN
            PERFORM refuse_binding(format('pattern %s is no text', cut_text(b ->> 'pattern', 80)), 'Write it as a string: "orders.*.created".');
        ELSIF jsonb_typeof(b -> 'headers') NOT IN ('object', 'null') THEN
            PERFORM refuse_binding(format('header conditions %s are no object', cut_text(b ->> 'headers', 80)), 'Write {"headers": {"region": "eu"}}.');
        ELSIF octet_length((b -> 'headers')::text) > 2048 THEN
            PERFORM refuse_binding(format('header conditions have %s bytes, more than 2048', octet_length((b -> 'headers')::text)), 'Select by less.');
        END IF;
        pattern := normal_pattern(b ->> 'pattern');
        headers := nullif(nullif(b -> 'headers', '{}'), 'null');
        IF pattern IS NULL AND headers IS NULL THEN
            PERFORM refuse_binding('a binding says nothing', 'It has a pattern, conditions on headers, or both; the pattern # takes everything.');
        END IF;
        IF headers IS NOT NULL THEN
            pattern := nullif(pattern, '#');
        END IF;
        normal := normal || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object('pattern', pattern)) || CASE WHEN headers IS NULL THEN '{}' ELSE jsonb_build_object('headers', headers) END);
    END LOOP;
    normal := (SELECT coalesce(jsonb_agg(DISTINCT x ORDER BY x), '[]') FROM jsonb_array_elements(normal) AS x);
    IF jsonb_array_length(normal) > 64 THEN
        PERFORM refuse_binding(format('%s bindings are more than 64', jsonb_array_length(normal)), 'Use wildcards, or a header that says what is for this group.');
    END IF;
    RETURN normal;
END $$;

-- A pattern in normal form as a regular expression for the whole routing key.
CREATE OR REPLACE FUNCTION pattern_regex(p_pattern text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    words text[] := string_to_array(p_pattern, '.');
    regex text := '';
    dot   text := '';   -- what stands before the next word
BEGIN
    IF p_pattern = '*' THEN
        RETURN '[^.]+';   -- the empty key has no word
    END IF;
    FOR i IN 1 .. cardinality(words) LOOP
        IF words[i] <> '#' THEN
            regex := regex || dot || CASE words[i] WHEN '*' THEN '[^.]*' ELSE regexp_replace(words[i], '([][\\^$.|?+(){}])', '\\\1', 'g') END;
            dot := '\.';
        ELSIF i = cardinality(words) THEN
            regex := regex || '(?:\..*)?';
        ELSE
            regex := regex || dot || '(?:.*\.)?';
            dot := '';
        END IF;
    END LOOP;
    RETURN regex;
END $$;

-- The condition that any of these patterns, in normal form, matches; cheapest first. NULL: every message does.
--
-- Never routing_key ~ ANY (…): a session keeps 32 compiled expressions, and with more of them it compiles for every row.
CREATE OR REPLACE FUNCTION patterns_condition(p_patterns text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    pattern  text;
    literals text[] := '{}';
    prefixes text[] := '{}';
    others   text[] := '{}';
    any_word boolean := false;
    parts    text[] := '{}';
BEGIN
    FOREACH pattern IN ARRAY p_patterns LOOP
        IF pattern = '#' THEN
            RETURN NULL;
        ELSIF pattern = '*.#' THEN
            any_word := true;
        ELSIF pattern !~ '[*#]' THEN
            literals := array_append(literals, pattern);
        ELSIF pattern ~ '^[^*#]+\.#$' THEN
            literals := array_append(literals, left(pattern, -2));
            prefixes := array_append(prefixes, left(pattern, -1));
        ELSE
            others := array_append(others, pattern_regex(pattern));
        END IF;
    END LOOP;
    IF any_word THEN
        parts := array_append(parts, 'routing_key <> ''''');
    END IF;
    IF cardinality(literals) = 1 THEN
        parts := array_append(parts, format('routing_key = %L', literals[1]));
    ELSIF cardinality(literals) > 1 THEN
        parts := array_append(parts, format('routing_key = ANY (%L::text[])', literals::text));
    END IF;
    FOREACH pattern IN ARRAY prefixes LOOP
        parts := array_append(parts, format('starts_with(routing_key, %L)', pattern));
    END LOOP;
    IF cardinality(others) > 0 THEN
        parts := array_append(parts, format('routing_key ~ %L', '^(?:' || array_to_string(others, '|') || ')$'));
    END IF;
    RETURN array_to_string(parts, ' OR ');
END $$;

-- The condition for a set of bindings in normal form, over the columns routing_key and headers. NULL: every message is for the
-- group.
CREATE OR REPLACE FUNCTION bindings_condition(p_bindings jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    plain text[] := ARRAY(SELECT b ->> 'pattern' FROM jsonb_array_elements(p_bindings) AS b WHERE b -> 'headers' IS NULL);
    parts text[] := '{}';
BEGIN
    IF p_bindings = '[]' OR '#' = ANY (plain) THEN
        RETURN NULL;
    END IF;
    IF cardinality(plain) > 0 THEN
        parts := ARRAY[patterns_condition(plain)];
    END IF;
    RETURN array_to_string(parts || ARRAY(
        SELECT CASE WHEN b -> 'pattern' IS NULL THEN format('headers @> %L::jsonb', b -> 'headers')
                    ELSE format('((%s) AND headers @> %L::jsonb)', patterns_condition(ARRAY[b ->> 'pattern']), b -> 'headers') END
        FROM jsonb_array_elements(p_bindings) AS b WHERE b -> 'headers' IS NOT NULL ORDER BY b -> 'pattern' IS NOT NULL), ' OR ');
END $$;
