DROP FUNCTION holdfast.release_dead(uuid, uuid, uuid[], bigint[], boolean, integer, integer,
                                    double precision, double precision);
