-- After an upgrade's functions are made: whoever could call those that were there before can call the new ones. The privileges are those of advance, which every
-- consumer calls (or of another such, where somebody has dropped that); sqlstreams.known_functions has what was there before.
DO $$
DECLARE
    known     oid[] := current_setting('sqlstreams.known_functions')::oid[];
    like_this oid := (SELECT oid FROM pg_proc WHERE oid = ANY (known) AND proname IN ('advance', 'extend', 'fetch') ORDER BY proname, oid LIMIT 1);
    f         record;
    a         record;
BEGIN
    FOR f IN SELECT p.oid::regprocedure AS name, coalesce(r.proacl, CASE WHEN r.oid IS NULL THEN l.proacl END) AS acl, coalesce(r.oid, l.oid) AS before
             FROM pg_proc AS p
             LEFT JOIN pg_proc AS l ON l.oid = like_this
             -- The one that it replaces, if one.
             LEFT JOIN LATERAL (SELECT o.oid, o.proacl FROM pg_proc AS o WHERE o.proname = 'replaced_' || p.proname AND o.pronamespace = p.pronamespace ORDER BY o.oid LIMIT 1) AS r ON true
             WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) AND p.oid <> ALL (known)
    LOOP
        CONTINUE WHEN f.acl IS NULL;   -- As it is by default, which is so for the new one as well.
        IF NOT EXISTS (SELECT FROM aclexplode(f.acl) AS x WHERE x.grantee = 0) THEN
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f.name);
        END IF;
        FOR a IN SELECT CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(g.rolname) END AS grantee, x.is_grantable FROM aclexplode(f.acl) AS x LEFT JOIN pg_roles AS g ON g.oid = x.grantee
                 WHERE x.grantee <> x.grantor LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s%s', f.name, a.grantee, CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' END);
        END LOOP;
    END LOOP;
END $$;
