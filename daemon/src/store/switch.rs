//! What operators switch for the whole database, and ask of single workers.

use serde_json::Value;
use time::OffsetDateTime;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::{Database, FlightError, StoreError, statements};
use crate::model::{Asked, WorkerId};

/// Whether claims are granted, and who last changed that.
#[derive(Clone, Debug)]
pub struct ClaimsSwitch {
    /// Whether they are.
    pub enabled: bool,
    /// The last change that an operator made; none when there was none.
    pub changed: Option<SwitchChange>,
}

/// A change of the switch.
#[derive(Clone, Debug)]
pub struct SwitchChange {
    /// When, by the database clock.
    pub at: OffsetDateTime,
    /// Who made it.
    pub actor: String,
    /// Why.
    pub reason: Option<String>,
}

impl Database {
    /// Whether claims are granted at all.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn claims_switch(&self) -> Result<ClaimsSwitch, StoreError> {
        let rows = self.query(statements::CLAIMS_SWITCH, &[]).await?;
        let row = rows
            .first()
            .ok_or_else(|| StoreError::Schema("the row of holdfast.control is missing".into()))?;
        let change = |at| SwitchChange { at, actor: row.get("actor"), reason: row.get("reason") };
        Ok(ClaimsSwitch {
            enabled: row.get("claims_enabled"),
            changed: row.get::<_, Option<OffsetDateTime>>("at").map(change),
        })
    }

    /// Grants claims, or grants none, in the whole database; whether that changed anything.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn switch_claims(
        &self,
        enabled: bool,
        actor: &str,
        reason: &str,
    ) -> Result<bool, FlightError> {
        let rows = self
            .flight(
                statements::SWITCH_CLAIMS,
                &[(&enabled, Type::BOOL), (&actor, Type::TEXT), (&reason, Type::TEXT)],
            )
            .await?;
        Ok(!rows.is_empty())
    }

    /// Asks workers for something, or for nothing any more; those that were asked. One that has ended
    /// or was asked to drain is not.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn ask_workers(
        &self,
        workers: &[WorkerId],
        asked: Option<Asked>,
        actor: &str,
        reason: Option<&str>,
    ) -> Result<Vec<WorkerId>, FlightError> {
        let ids: Vec<Uuid> = workers.iter().map(|worker| worker.uuid()).collect();
        let rows = self
            .flight(
                statements::ASK_WORKERS,
                &[
                    (&ids, Type::UUID_ARRAY),
                    (&asked.map(Asked::as_str), Type::TEXT),
                    (&actor, Type::TEXT),
                    (&reason, Type::TEXT),
                ],
            )
            .await?;
        Ok(rows.iter().map(|row| WorkerId::from_uuid(row.get(0))).collect())
    }

    /// Writes an entry of the audit log about the whole database.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn note_audit(
        &self,
        actor: &str,
        verb: &str,
        detail: &Value,
    ) -> Result<(), StoreError> {
        self.query(
            statements::NOTE_AUDIT,
            &[(&actor, Type::TEXT), (&verb, Type::TEXT), (&detail.to_string(), Type::TEXT)],
        )
        .await?;
        Ok(())
    }
}
