//! Checks items in their workspaces, behind the gate of their batch.

use std::sync::Arc;

use tracing::debug;

use crate::attempt::{CheckRequest, Checker};
use crate::check::{self, CheckInput, Workspace, needs_workspace};
use crate::model::Verdict;
use crate::workspace::{Gate, Refusal, WorkspaceId};

/// Makes what checks the items of a batch.
pub trait Checkers: Send + Sync {
    /// The checker of a batch; `gate` leads to the workspaces of its items.
    fn checker(&self, gate: &Arc<Gate>) -> Arc<dyn Checker>;
}

/// The checkers of every queue.
pub struct WorkspaceCheckers;

impl Checkers for WorkspaceCheckers {
    fn checker(&self, gate: &Arc<Gate>) -> Arc<dyn Checker> {
        Arc::new(WorkspaceChecker { gate: Arc::clone(gate) })
    }
}

struct WorkspaceChecker {
    gate: Arc<Gate>,
}

impl Checker for WorkspaceChecker {
    fn check(&self, request: &CheckRequest) -> Option<Verdict> {
        let without = CheckInput {
            criteria: &request.criteria,
            evidence: &request.evidence,
            workspace: Workspace::Unknown,
            directories: None,
            virtual_prefix: self.gate.virtual_prefix(),
        };
        if !needs_workspace(&request.criteria) {
            return check::run(&without);
        }
        let noted: Option<WorkspaceId> =
            request.workspace.as_deref().and_then(|text| text.parse().ok());
        // The holder lives until the last read has ended.
        match self.gate.reopen(request.item.position(), noted.as_ref()) {
            Ok(holder) => check::run(&CheckInput {
                workspace: Workspace::Open(holder.roots()),
                directories: Some(holder.directories()),
                ..without
            }),
            Err(Refusal::Denied(why)) => {
                check::run(&CheckInput { workspace: Workspace::Denied(&why), ..without })
            }
            Err(unseen @ (Refusal::Unseen(_) | Refusal::Failed(_))) => {
                debug!(item = %request.item, error = %unseen, "a check sees no workspace");
                check::run(&without)
            }
        }
    }
}
