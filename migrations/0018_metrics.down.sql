DROP FUNCTION holdfast.autoscale_demand(text);
DROP FUNCTION holdfast.batch_load(uuid);
DROP FUNCTION holdfast.waited(uuid, integer[]);

CREATE OR REPLACE FUNCTION holdfast.lock_parent(p_batch uuid) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_lock integer;
BEGIN
    PERFORM holdfast.assert_protocol();
    SELECT b.lock_no INTO v_lock FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_lock IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(1212564301, v_lock);
    END IF;
    RETURN v_lock;
END $$;

CREATE OR REPLACE FUNCTION holdfast.lock_parent_shared(p_batch uuid) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_lock integer;
BEGIN
    PERFORM holdfast.assert_protocol();
    SELECT b.lock_no INTO v_lock FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_lock IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock_shared(1212564301, v_lock);
    END IF;
    RETURN v_lock;
END $$;

DROP FUNCTION holdfast.note_lock_wait(timestamptz);
