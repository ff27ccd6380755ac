-- The session that detaches waits as long as it takes. Only where it is one of its own, which the setting tells that it has come with: a pooler's is for others, too.
SELECT set_config('transaction_timeout', '0', false) WHERE current_setting('sqlstreams.session', true) = 'own' AND current_setting('transaction_timeout', true) IS NOT NULL
