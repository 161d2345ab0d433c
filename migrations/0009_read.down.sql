DROP VIEW holdfast.batch_status;
DROP FUNCTION holdfast.is_current(uuid, uuid, integer, bigint);
DROP FUNCTION holdfast.positions_with_status(uuid, text, integer, integer);
DROP FUNCTION holdfast.items_at(uuid, integer[]);
