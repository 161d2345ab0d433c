//! All SQL, except the protocol's functions, which the migrations create: connections, the
//! one-flight transaction, typed calls of the protocol, plain queries, migrations.
//!
//! No policy lives here: what should happen is decided by the stages above.

mod batches;
mod checks;
mod connect;
mod doctor;
mod error;
mod flight;
mod global;
mod items;
mod leases;
pub mod locking;
pub mod migrate;
mod notify;
mod protocol;
mod prune;
mod recovery;
mod release;
mod revoke;
pub mod statements;
mod submission;
mod sweeps;
mod switch;
mod upstreams;
mod workers;

pub use batches::{BatchFilter, BatchRow, BatchWork, RankedBatch};
pub use checks::{
    Concluding, Recheck, RecheckBatch, RecheckRequest, StageAnswer, StagedItem, Staging,
};
pub use connect::{Database, DatabaseOptions};
pub use doctor::{Fact, Look, ToVerify};
pub use error::StoreError;
pub use flight::FlightError;
pub use items::{AttemptRow, ExportPage, ExportRange, ExportRow, ItemInput, ItemRow};
pub use leases::{LeaseFilter, LeaseRow};
pub use notify::{Event, Listener};
pub use protocol::{
    Claim, ClaimAnswer, ClaimRequest, ControlAnswer, ControlVerb, HandIn, HandInAnswer, LeaseState,
    ReapDisposition, ReapPolicy, Reaped, RenewAnswer, Renewal, Reports, RetryAnswer, Vouched,
};
pub use prune::{Cleared, Old, Prunable, PrunePlan};
pub use recovery::{Raised, RecoveryPlan};
pub use release::{DeadLease, TakenBack};
pub use revoke::{Revocation, RevokeAnswer};
pub use submission::{BatchRecord, ItemStream, Stored, SubmissionError};
pub use sweeps::{BeforeReap, ServerReading};
pub use switch::{ClaimsSwitch, SwitchChange};
pub use upstreams::{Granted, RequestsWanted, SpentRow};
pub use workers::WorkerRow;
