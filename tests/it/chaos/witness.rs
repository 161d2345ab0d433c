//! What the database saw: triggers that log every grant, outcome and end in its own order.

use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::model::{BatchId, FencingToken, ItemRef, LeaseId, Position};
use tokio_postgres::{Client, Row};
use uuid::Uuid;

use super::history::{BatchEnd, Event, EventKind, Final, History, Right};

/// The log is of the transactions themselves: what is rolled back or lost is not in it either. Of
/// one item no two transactions are under way at once, so the numbers rise in their order.
const TRIGGERS: &str = r"
CREATE SCHEMA chaos;
CREATE TABLE chaos.log (
    seq bigint GENERATED ALWAYS AS IDENTITY, at timestamptz DEFAULT clock_timestamp(),
    what text, batch_id uuid, position integer, lease_id uuid, token bigint, ending text,
    by_holder boolean);
CREATE FUNCTION chaos.granted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO chaos.log (what, batch_id, position, lease_id, token)
    SELECT 'granted', NEW.batch_id, p, NEW.lease_id, NEW.token FROM unnest(NEW.positions) p;
    RETURN NULL;
END $$;
CREATE FUNCTION chaos.published() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO chaos.log (what, batch_id, position, lease_id, token)
    VALUES ('published', NEW.batch_id, NEW.position, NEW.lease_id, NEW.token);
    RETURN NULL;
END $$;
CREATE FUNCTION chaos.changed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO chaos.log (what, batch_id, position)
    VALUES (CASE TG_OP WHEN 'DELETE' THEN 'withdrawn' ELSE 'changed' END,
            OLD.batch_id, OLD.position);
    RETURN NULL;
END $$;
CREATE FUNCTION chaos.ended() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO chaos.log (what, batch_id, position, lease_id, token, ending, by_holder)
    VALUES ('ended', NEW.batch_id, NEW.position, NEW.lease_id, NEW.token, NEW.ending,
            NEW.by_holder);
    RETURN NULL;
END $$;
CREATE FUNCTION chaos.cancelled() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO chaos.log (what, batch_id) VALUES ('cancelled', NEW.id);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT ON holdfast.leases
    FOR EACH ROW EXECUTE FUNCTION chaos.granted();
CREATE TRIGGER chaos AFTER INSERT ON holdfast.outcomes
    FOR EACH ROW EXECUTE FUNCTION chaos.published();
CREATE TRIGGER chaos_changed AFTER UPDATE OR DELETE ON holdfast.outcomes
    FOR EACH ROW EXECUTE FUNCTION chaos.changed();
CREATE TRIGGER chaos AFTER INSERT ON holdfast.attempts
    FOR EACH ROW EXECUTE FUNCTION chaos.ended();
CREATE TRIGGER chaos AFTER UPDATE ON holdfast.batches FOR EACH ROW
    WHEN (OLD.control <> 'cancelled' AND NEW.control = 'cancelled')
    EXECUTE FUNCTION chaos.cancelled();
";

pub(super) async fn install(sql: &Client) {
    sql.batch_execute(TRIGGERS).await.unwrap();
}

/// Everything but the notes and the promises.
pub(super) async fn history(sql: &Client) -> History {
    let mut history = History::default();
    let batches = "SELECT b.id, b.finished_at IS NOT NULL, b.control = 'cancelled',
        (SELECT min(l.seq) FROM chaos.log l WHERE l.batch_id = b.id AND l.what = 'cancelled'),
        (SELECT count(*) FROM holdfast.items i WHERE i.batch_id = b.id) FROM holdfast.batches b";
    for row in sql.query(batches, &[]).await.unwrap() {
        let end = BatchEnd {
            finished: row.get(1),
            cancelled: row.get(2),
            cancelled_seq: row.get(3),
            items: usize::try_from(row.get::<_, i64>(4)).unwrap(),
        };
        history.batches.insert(BatchId::from_uuid(row.get(0)), end);
    }
    let outcomes = "SELECT batch_id, position, lease_id, token, status = 'succeeded',
        result #>> '{}', stop_reason FROM holdfast.outcomes";
    for row in sql.query(outcomes, &[]).await.unwrap() {
        let end = Final {
            succeeded: row.get(4),
            right: right(&row),
            result: row.get(5),
            stop_reason: row.get(6),
        };
        history.outcomes.insert(item(&row), end);
    }
    // Of one machine: its clocks are as far apart now as they were then, or nearly so.
    let (boot, wall) = (SystemClock.now().as_nanos(), SystemClock.wall());
    let log = "SELECT batch_id, position, lease_id, token, what, ending, by_holder, seq, at
                 FROM chaos.log WHERE position IS NOT NULL ORDER BY seq";
    for row in sql.query(log, &[]).await.unwrap() {
        let kind = match row.get(4) {
            "granted" => EventKind::Granted(right(&row).expect("a grant has one")),
            "published" => EventKind::Published(right(&row)),
            "withdrawn" => EventKind::Withdrawn,
            "changed" => EventKind::Changed,
            "ended" => EventKind::Ended {
                right: right(&row).expect("an end has one"),
                ending: row.get(5),
                by_holder: row.get(6),
            },
            other => panic!("{other} is never logged"),
        };
        let ago: Duration = (wall - row.get::<_, time::OffsetDateTime>(8)).unsigned_abs();
        let at = Duration::from_nanos(boot).saturating_sub(ago);
        history.events.push(Event { item: item(&row), kind, at, seq: row.get(7) });
    }
    history
}

fn item(row: &Row) -> ItemRef {
    ItemRef::new(BatchId::from_uuid(row.get(0)), Position::new(row.get(1)))
}

/// Of the row's lease and token; none when a sweep wrote it.
fn right(row: &Row) -> Option<Right> {
    let lease: Option<Uuid> = row.get(2);
    lease.map(|lease| Right {
        lease: LeaseId::from_uuid(lease),
        token: FencingToken::new(row.get(3)),
    })
}
