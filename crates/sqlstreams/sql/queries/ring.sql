-- By itself, without a transaction around it: nobody waits for the disk.
SELECT set_config('synchronous_commit', 'off', true), {schema}.ring($1)
