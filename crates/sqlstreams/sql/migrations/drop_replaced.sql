-- Drops the functions that others have replaced.
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT oid FROM pg_proc WHERE proname LIKE 'replaced\_%' AND pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) LOOP
        EXECUTE format('DROP FUNCTION %s', f);
    END LOOP;
END $$;
