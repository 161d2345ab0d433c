DROP FUNCTION holdfast.clear_cancelled(uuid, integer);
DROP FUNCTION holdfast.reap(uuid, boolean, integer, integer, double precision, double precision);
