DROP FUNCTION holdfast.claim(uuid, uuid, uuid, integer, double precision, text);
DROP FUNCTION holdfast.take_due(uuid, boolean, timestamptz, timestamptz, integer);
DROP FUNCTION holdfast.raise_epoch_if_moved();
