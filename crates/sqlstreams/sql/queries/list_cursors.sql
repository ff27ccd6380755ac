SELECT stream, consumer_group, claimed, resolved, head, lag, open_leases, ready, inflight, dead FROM {schema}.list_cursors($1, $2)
