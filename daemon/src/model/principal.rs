use serde::{Deserialize, Serialize};

/// On whose behalf a batch was submitted, stored with it: what it may use is asked of this, whatever
/// process runs its items. Source: `batches.principal`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Principal {
    /// The owner it acts for.
    pub owner: String,
    /// Its role, a name of `[access.roles]`.
    pub role: String,
}
