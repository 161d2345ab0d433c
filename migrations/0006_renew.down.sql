DROP FUNCTION holdfast.renew(uuid, double precision, text, integer, uuid[], uuid[], bigint[], text[]);
