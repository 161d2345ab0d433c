//! `holdfast recover`.

use std::io::{self, BufRead, IsTerminal, Write};

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::Global;
use super::context::{actor, block_on, connect, load_settings};
use super::control::persist;
use super::exit::{CliError, Exit};
use super::output::{pairs, print_json, print_line, print_text, time};
use crate::model::FencingToken;
use crate::store::{Database, Raised, RecoveryPlan};

/// After a restore or a failover that lost commits: keep fencing tokens rising.
///
/// A promoted standby is on a timeline of its own, and the first claim there raises the epoch by
/// itself. A disk snapshot that was put back looks like the server it was taken from, so tokens
/// that were handed out after it would be handed out again: raise the epoch by hand, before the
/// first worker starts.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  holdfast recover plan
  holdfast recover raise-epoch --yes")]
pub(super) struct RecoverArguments {
    #[command(subcommand)]
    command: RecoverCommand,
}

#[derive(Debug, Subcommand)]
enum RecoverCommand {
    /// Show what a raise of the epoch would find, and what to check before; changes nothing.
    #[command(after_help = "\
Examples:
  holdfast recover plan
  holdfast recover plan --json")]
    Plan,
    /// Raise the token epoch, so that every later token is above all before; audited.
    ///
    /// Safe at any time: leases that are there go on with the tokens they have, and nothing new is
    /// handed out for the length of the longest lease, until executions whose claims were lost have
    /// ended. Done twice it is raised twice, which does no harm.
    #[command(after_help = "\
Exit codes: 2 not confirmed; 73 it was raised by another meanwhile.

Examples:
  holdfast recover raise-epoch
  holdfast recover raise-epoch --above 3852132340813168642 --yes --json")]
    RaiseEpoch {
        /// A token known from elsewhere that later ones shall be above, such as the highest that a
        /// target of the work has seen.
        #[arg(long, value_name = "TOKEN", value_parser = token)]
        above: Option<FencingToken>,
        /// Do not ask.
        #[arg(long)]
        yes: bool,
    },
}

fn token(text: &str) -> Result<FencingToken, String> {
    let token = text.parse().map_err(|_| "a token is a whole number".to_owned())?;
    // Room for the epoch above it, whose tokens fit in 63 bits as well.
    if (1..i64::MAX >> 1).contains(&token) {
        Ok(FencingToken::new(token))
    } else {
        Err("no token of this database can be that".to_owned())
    }
}

/// What only a person can know, in the order in which it matters.
const CHECKS: [&str; 5] = [
    "no worker of before the restore reaches this database: stop them all, or block their way to it",
    "the server has recovered to the point that was meant, and is the one that everybody reaches",
    "what was cancelled or submitted after that point is known from logs, and is repeated",
    "targets that keep the highest token they have seen: give that to raise-epoch --above",
    "items that ran after that point run again: their targets know their idempotency keys",
];

pub(super) fn run(global: &Global, arguments: &RecoverArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        match arguments.command {
            RecoverCommand::Plan => plan(&database, global.json).await?,
            RecoverCommand::RaiseEpoch { above, yes } => {
                raise(&database, above, yes, global.json).await?;
            }
        }
        Ok(Exit::Done)
    })
}

async fn plan(database: &Database, json: bool) -> Result<(), CliError> {
    let plan = database.recovery_plan().await?;
    if json {
        return print_json(&document(&plan));
    }
    print_text(&text(&plan))?;
    print_line("\nCheck before it is raised after a restore:")?;
    CHECKS.iter().try_for_each(|check| print_line(&format!("- {check}")))
}

async fn raise(
    database: &Database,
    above: Option<FencingToken>,
    yes: bool,
    json: bool,
) -> Result<(), CliError> {
    let plan = database.recovery_plan().await?;
    if !yes {
        confirm(&plan)?;
    }
    let actor = actor();
    let raised = persist(async || database.raise_epoch(plan.epoch, above, &actor).await).await?;
    let Raised { epoch, settles_in } = if let Some(raised) = raised {
        raised
    } else {
        // A try whose answer was lost may have been the one that raised it.
        let RecoveryPlan { epoch, settles_in, .. } = database.recovery_plan().await?;
        Raised { epoch, settles_in }
    };
    let high_enough = above.is_none_or(|above| epoch > above.get() >> 31);
    if epoch <= plan.epoch || !high_enough {
        let message =
            format!("the epoch is {epoch} now: another raised it; look at the plan again");
        return Err(CliError::new(Exit::Conflict, message));
    }
    if json {
        return print_json(&json!({
            "before": plan.epoch.to_string(),
            "epoch": epoch.to_string(),
            "settles_in_s": settles_in.as_secs_f64(),
        }));
    }
    print_line(&format!("raised the epoch from {} to {epoch}", plan.epoch))?;
    let waits = settles_in.as_secs_f64().ceil();
    print_line(&format!("claims wait for {waits} s: what runs under lost leases has ended by then"))
}

/// Asks at a terminal; elsewhere it takes the flag.
fn confirm(plan: &RecoveryPlan) -> Result<(), CliError> {
    let question = format!(
        "this raises the epoch from {} to at least {}, for good",
        plan.epoch, plan.next_epoch
    );
    if !io::stdin().is_terminal() {
        let wrong = format!("{question}; give --yes to do that without being asked");
        return Err(CliError::new(Exit::Usage, wrong));
    }
    drop(write!(io::stderr().lock(), "{question}. Go on? Type yes: "));
    let mut answer = String::new();
    drop(io::stdin().lock().read_line(&mut answer));
    if answer.trim() == "yes" {
        Ok(())
    } else {
        Err(CliError::new(Exit::Usage, "nothing was changed"))
    }
}

fn document(plan: &RecoveryPlan) -> Value {
    json!({
        "epoch": plan.epoch.to_string(),
        "next_epoch": plan.next_epoch.to_string(),
        "last_token": plan.last_token.to_string(),
        "highest_token_held": plan.highest_held.map(|token| token.to_string()),
        "moved": plan.moved,
        "claims_enabled": plan.claims_enabled,
        "settles_in_s": plan.settles_in.as_secs_f64(),
        "leases": plan.leases,
        "leases_expired": plan.leases_expired,
        "items_held": plan.items_held,
        "live_workers": plan.live_workers,
        "unfinished_batches": plan.unfinished_batches,
        "check": CHECKS,
    })
}

fn text(plan: &RecoveryPlan) -> String {
    let moved = if plan.moved {
        "yes: the next claim raises the epoch by itself"
    } else {
        "no: after a restored disk snapshot it has to be raised by hand"
    };
    let claims = match (plan.claims_enabled, plan.settles_in.as_secs_f64()) {
        (false, _) => "off".to_owned(),
        (true, 0.0) => "on".to_owned(),
        (true, waits) => format!("on; they wait for {waits:.0} s yet, since the epoch was raised"),
    };
    pairs(&[
        ("epoch", format!("{}, since {}", plan.epoch, time(plan.changed_at))),
        ("after a raise", format!("{} or more", plan.next_epoch)),
        ("last token", plan.last_token.to_string()),
        ("another server", moved.to_owned()),
        ("server started", time(plan.server_started)),
        ("claims", claims),
        (
            "leases",
            format!(
                "{} with {} items, {} of them expired; they go on as they are",
                plan.leases, plan.items_held, plan.leases_expired
            ),
        ),
        ("live workers", plan.live_workers.to_string()),
        ("unfinished", format!("{} batches", plan.unfinished_batches)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_leaves_room_for_those_above_it() {
        assert_eq!(token("3852132340813168642"), Ok(FencingToken::new(3_852_132_340_813_168_642)));
        for wrong in ["", "0", "-1", "x", "1.5", "9223372036854775807"] {
            assert!(token(wrong).is_err(), "{wrong}");
        }
    }
}
