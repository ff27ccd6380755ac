-- What this version has installed, for the doctor: functions that somebody drops or replaces are seen by it. Made last, in the transaction that has made all of them.

-- The list is a function's text, not a table's rows: a dump of the schema has it, and a restore of data alone leaves it as it is.
DO $make$
DECLARE
    list text;
BEGIN
    SELECT string_agg(format('(%L, %L)', x.name, x.digest), ', ' ORDER BY x.name COLLATE "C") INTO list
    FROM (SELECT p.oid::regprocedure::text AS name, function_digest(p.oid) AS digest FROM pg_proc AS p
          -- Those that were made in this transaction: somebody's own are older.
          WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) AND p.xmin = pg_current_xact_id()::xid
            AND p.proname !~ '^(replaced_.*|installed_functions|(settle_message|produce|latest_message|current_messages)_\d+)$') AS x;
    EXECUTE format('CREATE OR REPLACE FUNCTION installed_functions() RETURNS TABLE (signature text, digest text) LANGUAGE sql STABLE AS %L', 'VALUES ' || list);
END $make$;
