//! Leases that an operator takes from their holders (F8).

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::{Database, FlightError, LeaseRow, statements};
use crate::model::{FencingToken, LeaseId};

/// When the items of a revoked lease may be given to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revocation {
    /// When the lease expires: until then its worker may be ending what it runs.
    AtExpiry,
    /// Now: its worker has ended, or is silent for two leases and the lease has expired.
    AtOnce,
    /// Now, and somebody vouches that nothing of it runs any more.
    WorkerIsGone,
}

/// What became of one lease.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RevokeAnswer {
    /// No holder can use it any more.
    Revoked {
        /// The token that it has now, which nobody holds.
        token: FencingToken,
        /// Seconds until it expires; not positive when it has.
        expires_in_s: f64,
    },
    /// Its worker may be alive: it cannot end at once.
    Refused,
    /// It is not there any more, or under another token.
    Gone,
}

impl Database {
    /// Takes leases, all of one batch, from their holders; answers in the order given.
    ///
    /// # Errors
    /// Repeating it is safe: what was revoked already is gone under its old token.
    pub async fn revoke(
        &self,
        leases: &[LeaseRow],
        how: Revocation,
        actor: &str,
        reason: &str,
    ) -> Result<Vec<RevokeAnswer>, FlightError> {
        let Some(first) = leases.first() else { return Ok(Vec::new()) };
        let ids: Vec<Uuid> = leases.iter().map(|lease| lease.lease.uuid()).collect();
        let tokens: Vec<i64> = leases.iter().map(|lease| lease.token.get()).collect();
        let rows = self
            .flight(
                statements::REVOKE,
                &[
                    (&first.batch.uuid(), Type::UUID),
                    (&ids, Type::UUID_ARRAY),
                    (&tokens, Type::INT8_ARRAY),
                    (&(how != Revocation::AtExpiry), Type::BOOL),
                    (&(how == Revocation::WorkerIsGone), Type::BOOL),
                    (&actor, Type::TEXT),
                    (&reason, Type::TEXT),
                ],
            )
            .await?;
        let answer = |lease: LeaseId| {
            let of_lease =
                |row: &&tokio_postgres::Row| row.get::<_, Uuid>("lease_id") == lease.uuid();
            match rows.iter().find(of_lease) {
                Some(row) if row.get::<_, &str>("answer") == "revoked" => RevokeAnswer::Revoked {
                    token: FencingToken::new(row.get("token")),
                    expires_in_s: row.get("expires_in_s"),
                },
                Some(row) if row.get::<_, &str>("answer") == "refused" => RevokeAnswer::Refused,
                Some(_) | None => RevokeAnswer::Gone,
            }
        };
        Ok(leases.iter().map(|lease| answer(lease.lease)).collect())
    }
}
