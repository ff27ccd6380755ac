SELECT {schema}.become_owner(), pg_backend_pid(), {schema}.ring_channel()
