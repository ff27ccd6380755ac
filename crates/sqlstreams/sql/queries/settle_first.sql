-- The first half of settle_in_transaction for one message of a lease: the row. Not where the handler has ended the transaction,
-- or it would be committed by itself.
INSERT INTO {schema}.consumer_done_{stream} (group_id, message_id)
SELECT $1, $2 WHERE current_setting('sqlstreams.transaction', true) = $3
ON CONFLICT (group_id, message_id) DO UPDATE SET message_id = {schema}.refuse_repeated(1)
