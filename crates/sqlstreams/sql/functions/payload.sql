-- Which payloads of a refused batch the server would not take, and why: their places (from 0) and its messages.
-- Only asked after a batch was refused; nothing is stored.
CREATE OR REPLACE FUNCTION invalid_payloads(p_payload_type text, p_payloads bytea[]) RETURNS TABLE (place int, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    payload text;
    context text;
BEGIN
    FOR i IN 1 .. coalesce(array_length(p_payloads, 1), 0) LOOP
        BEGIN
            IF p_payload_type <> 'bytea' THEN
                payload := convert_from(p_payloads[i], 'UTF8');
                IF p_payload_type = 'json' THEN
                    PERFORM payload::json;
                ELSIF p_payload_type = 'jsonb' THEN
                    PERFORM payload::jsonb;
                END IF;
            END IF;
        EXCEPTION WHEN data_exception OR program_limit_exceeded OR statement_too_complex OR out_of_memory OR internal_error THEN
            GET STACKED DIAGNOSTICS reason = MESSAGE_TEXT, context = PG_EXCEPTION_DETAIL;
            place := i - 1;
            reason := reason || CASE WHEN context <> '' THEN ': ' || context ELSE '' END;
            RETURN NEXT;
        END;
    END LOOP;
END $$;
