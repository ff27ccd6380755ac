SELECT pg_current_xact_id()::text, pg_backend_pid()
