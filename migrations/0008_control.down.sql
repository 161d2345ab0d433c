DROP FUNCTION holdfast.retry_failed(uuid, text, integer[], integer, integer, text);
DROP FUNCTION holdfast.control_batch(uuid, text, text, text);
DROP FUNCTION holdfast.end_batch(uuid);
