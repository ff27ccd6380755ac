CREATE OR REPLACE FUNCTION expected_shape() RETURNS TABLE (of text, part text, definition text, only text)
LANGUAGE sql IMMUTABLE AS $shape$ SELECT NULL::text, NULL::text, NULL::text, NULL::text WHERE false $shape$;
