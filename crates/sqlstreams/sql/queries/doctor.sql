SELECT code, severity, stream, consumer_group, message, hint, fixable, detail::text FROM {schema}.doctor($1)
