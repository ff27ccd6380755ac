-- The second half: whether the message is the caller's still, and this the transaction that was lent. The usual case is told
-- from here; whatever is not is looked at closely.
SELECT CASE
    WHEN current_setting('sqlstreams.transaction', true) = $4 AND current_setting('transaction_isolation') = 'read committed'
     AND EXISTS (SELECT FROM (SELECT token, pending FROM {schema}.consumer_lease_{stream} WHERE group_id = $1 ORDER BY seq DESC LIMIT 3) AS newest
                 WHERE token = $2 AND pending @> $3)
    THEN true
    ELSE {schema}.require_held({stream}, $1, $2, ARRAY[$3], $4) END
