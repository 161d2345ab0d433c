//! `holdfast leases expire` and `holdfast leases release`.

use std::time::Duration;

use serde_json::{Value, json};

use super::Chosen;
use crate::cli::Global;
use crate::cli::context::{actor, block_on, connect, load_settings};
use crate::cli::control::persist;
use crate::cli::exit::{CliError, Exit};
use crate::cli::find::workers_named;
use crate::cli::output::{brief, or_dash, print_json, print_line, print_text, remark, table};
use crate::config::Settings;
use crate::model::FencingToken;
use crate::store::{
    Database, DeadLease, LeaseFilter, LeaseRow, ReapPolicy, Revocation, RevokeAnswer,
};

/// How often items are given back while another has their batch's ticket (L4).
const TRIES: usize = 50;
const BETWEEN_TRIES: Duration = Duration::from_millis(20);

pub(super) fn expire(global: &Global, chosen: &Chosen) -> Result<Exit, CliError> {
    run(global, chosen, Revocation::AtExpiry)
}

pub(super) fn release(
    global: &Global,
    chosen: &Chosen,
    worker_is_gone: bool,
) -> Result<Exit, CliError> {
    let how = if worker_is_gone { Revocation::WorkerIsGone } else { Revocation::AtOnce };
    run(global, chosen, how)
}

fn run(global: &Global, chosen: &Chosen, how: Revocation) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let mut leases = find(&database, chosen).await?;
        if !chosen.yes {
            show(&leases, how, global.json)?;
            return Ok(Exit::Done);
        }
        leases.sort_by_key(|lease| lease.batch);
        let mut exit = Exit::Done;
        for of_batch in leases.chunk_by(|one, other| one.batch == other.batch) {
            let done = Act { database: &database, settings: &settings, how, json: global.json };
            if !done.act(of_batch, &chosen.reason).await? {
                exit = Exit::Conflict;
            }
        }
        Ok(exit)
    })
}

/// The leases that were chosen, as they are now. All that are named have to be there.
async fn find(database: &Database, chosen: &Chosen) -> Result<Vec<LeaseRow>, CliError> {
    let mut filter = LeaseFilter { owner: chosen.owner.owner.clone(), ..LeaseFilter::default() };
    match &chosen.worker {
        Some(worker) => {
            let workers = workers_named(database, std::slice::from_ref(worker)).await?;
            filter.workers = Some(workers.iter().map(|row| row.id).collect());
        }
        None => filter.leases = Some(chosen.leases.clone()),
    }
    let leases = database.leases(&filter, i64::MAX).await?;
    let there = |lease| leases.iter().any(|row| row.lease == lease);
    match chosen.leases.iter().find(|lease| !there(**lease)) {
        None => Ok(leases),
        Some(lease) => {
            let message = format!("no lease {lease}, or not one of this owner");
            Err(CliError::new(Exit::Denied, message))
        }
    }
}

/// What would happen.
fn show(leases: &[LeaseRow], how: Revocation, json: bool) -> Result<(), CliError> {
    if json {
        return leases.iter().try_for_each(|lease| print_json(&document(lease, how, "dry_run")));
    }
    let when = |lease: &LeaseRow| match how {
        Revocation::AtExpiry if lease.expired => "when it is taken back".to_owned(),
        Revocation::AtExpiry => format!("in {:.0} s", lease.margin_s.ceil()),
        Revocation::AtOnce => "at once, if its worker is gone".to_owned(),
        Revocation::WorkerIsGone => "at once".to_owned(),
    };
    let rows: Vec<[String; 5]> = leases
        .iter()
        .map(|lease| {
            let worker = or_dash(lease.worker_name.as_ref().map(|name| brief(name, 32)));
            let items = format!("{}/{}", lease.started, lease.items);
            [lease.lease.to_string(), lease.batch.to_string(), worker, items, when(lease)]
        })
        .collect();
    print_text(&table(["lease", "batch", "worker", "started", "its items run again"], &rows))?;
    remark("nothing was changed; give --yes to do it");
    Ok(())
}

fn document(lease: &LeaseRow, how: Revocation, answer: &str) -> Value {
    json!({
        "lease": lease.lease,
        "batch": lease.batch,
        "worker": lease.worker,
        "worker_name": lease.worker_name,
        "token": lease.token.to_string(),
        "items": lease.items,
        "started": lease.started,
        "margin_s": lease.margin_s,
        "at_once": how != Revocation::AtExpiry,
        "answer": answer,
    })
}

struct Act<'a> {
    database: &'a Database,
    settings: &'a Settings,
    how: Revocation,
    json: bool,
}

impl Act<'_> {
    /// Revokes leases of one batch; whether none refused.
    async fn act(&self, leases: &[LeaseRow], reason: &str) -> Result<bool, CliError> {
        let actor = actor();
        let revoke = async || self.database.revoke(leases, self.how, &actor, reason).await;
        let answers = persist(revoke).await?;
        let mut all = true;
        for (lease, answer) in leases.iter().zip(answers) {
            let (word, said) = match answer {
                RevokeAnswer::Revoked { token, expires_in_s } => {
                    let said = match self.how {
                        Revocation::AtExpiry => format!(
                            "is revoked: its items run again in {:.0} s",
                            expires_in_s.max(0.0).ceil()
                        ),
                        Revocation::AtOnce | Revocation::WorkerIsGone => {
                            self.give_back(lease, token).await?
                        }
                    };
                    ("revoked", said)
                }
                RevokeAnswer::Refused => ("refused", "is kept: its worker may be alive".to_owned()),
                RevokeAnswer::Gone => ("gone", "is not there any more as it was".to_owned()),
            };
            all &= matches!(answer, RevokeAnswer::Revoked { .. });
            if self.json {
                print_json(&document(lease, self.how, word))?;
            } else {
                print_line(&format!("lease {} {said}", lease.lease))?;
            }
        }
        Ok(all)
    }

    /// Gives the items of a revoked lease back now, rather than with the next sweep.
    async fn give_back(&self, lease: &LeaseRow, token: FencingToken) -> Result<String, CliError> {
        let retry = &self.settings.retry;
        let policy = ReapPolicy {
            charge: false,
            max_crashes: retry.max_crashes,
            max_interruptions: retry.max_interruptions,
            backoff_base: retry.backoff_base,
            backoff_max: retry.backoff_max,
        };
        let dead = [DeadLease {
            batch: lease.batch,
            queue: lease.queue.clone(),
            lease: lease.lease,
            token,
            // For what is counted afterwards, which an operator is not.
            positions: Vec::new(),
        }];
        for _ in 0..TRIES {
            let release = async || self.database.release_dead(lease.worker, &dead, &policy).await;
            let items = persist(release).await?;
            if items > 0 {
                return Ok(format!("is over: {items} items are given back"));
            }
            tokio::time::sleep(BETWEEN_TRIES).await;
        }
        Ok("is over: its items are given back with the next sweep".to_owned())
    }
}
