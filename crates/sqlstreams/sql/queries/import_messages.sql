SELECT stored, skipped, first_id, last_id FROM {schema}.import_messages($1, $2, $3, $4, $5, $6, $7, $8, $9, $10::{payload_type}[])
