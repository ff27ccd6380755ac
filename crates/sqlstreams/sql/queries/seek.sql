SELECT before_id, after_id, repeated, skipped, ended_leases, unfinished, restarted, dead FROM {schema}.seek($1, $2, $3, $4, $5, $6, $7, $8)
