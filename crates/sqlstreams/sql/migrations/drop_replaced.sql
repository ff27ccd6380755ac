-- Drops the functions that others have replaced. One that somebody's own view or function is made of stays.
DO $$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT oid FROM pg_proc WHERE proname LIKE 'replaced\_%' AND pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) LOOP
        BEGIN
            EXECUTE format('DROP FUNCTION %s', f);
        EXCEPTION WHEN dependent_objects_still_exist THEN
            NULL;
        END;
    END LOOP;
END $$;
