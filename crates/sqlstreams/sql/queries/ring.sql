-- By itself, without a transaction around it: nobody waits for the disk. As the function ring does it, which is for callers in SQL:
-- written out, since to plan two functions anew costs more than all else here.
SELECT set_config('synchronous_commit', 'off', true), pg_notify('sqlstreams_' || n.oid, s::text)
FROM pg_namespace AS n, unnest($1) AS s WHERE n.nspname = $2 AND (SELECT pg_notification_queue_usage()) < 0.5
