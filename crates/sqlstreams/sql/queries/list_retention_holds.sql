SELECT stream, reason, consumer_group, resolved, since, detail FROM {schema}.list_retention_holds($1)
