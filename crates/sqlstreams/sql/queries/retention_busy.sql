SELECT who, since FROM {schema}.retention_busy($1)
