SELECT place, reason FROM {schema}.invalid_payloads($1, $2)
