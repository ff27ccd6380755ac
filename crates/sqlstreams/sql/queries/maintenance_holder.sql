SELECT holder, name, since, (extract(epoch FROM until - clock_timestamp()) * 1000)::bigint FROM {schema}.maintenance ORDER BY generation DESC LIMIT 1
