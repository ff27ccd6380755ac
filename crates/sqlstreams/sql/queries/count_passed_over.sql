SELECT {schema}.count_passed_over($1, $2, $3, $4)
