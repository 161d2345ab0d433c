DROP FUNCTION holdfast.hand_in(uuid, uuid, double precision, uuid[], bigint[], integer[], text[],
    integer[], timestamptz[], timestamptz[], text[], boolean[], bigint[], text[], text[],
    integer[], integer[], text[], boolean[], double precision[], bigint[]);
DROP FUNCTION holdfast.was_applied(uuid, integer, uuid, bigint);
