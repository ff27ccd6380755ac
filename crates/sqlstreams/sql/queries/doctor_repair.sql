SELECT {schema}.doctor_repair($1, $2)::text
