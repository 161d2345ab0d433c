//! The executions that a keeper runs, and what it does about them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions, wait, waitid};

use super::wire::{self, ExecutionId, Order, Report};
use crate::clock::BootInstant;
use crate::execute::processes::{self, Children, Process};
use crate::execute::spawn::Started;
use crate::execute::spawner::Exit;
use crate::model::LeaseId;

/// In the environment of every execution: whose its processes are, wherever they end up.
pub(super) const MARK: &str = "HOLDFAST_EXECUTION";

/// How often to look after processes that were killed and are not gone.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(50);
/// How often to look at the clock while something runs: timers of the kernel stop while the machine
/// is suspended.
const IDLE_LOOK: Duration = Duration::from_millis(250);

/// The controls of an execution that is about to be entered.
pub(super) struct Terms {
    pub(super) lease: LeaseId,
    pub(super) trusted_until: BootInstant,
    pub(super) grace: Duration,
    /// A moment before it was started, in clock ticks since boot.
    pub(super) started_tick: u64,
}

struct Execution {
    terms: Terms,
    started: Started,
    /// KILL then; set when TERM was sent because the trust deadline passed.
    kill_at: Option<BootInstant>,
    killing: bool,
    /// Whether the keeper ended it for its deadline.
    fenced: bool,
    /// Whether its leader was seen to have exited.
    exited: bool,
    /// Processes that descended from it when it was killed.
    members: Vec<Process>,
}

impl Execution {
    fn leader(&self) -> Pid {
        self.started.leader.pid()
    }

    /// When to look at it again.
    fn next_look(&self) -> Option<BootInstant> {
        if self.killing { None } else { Some(self.kill_at.unwrap_or(self.terms.trusted_until)) }
    }

    /// Kills what can be named of it now. Its leader is not reaped: the id of its group is its own.
    fn kill(&mut self) {
        if !self.killing {
            self.killing = true;
            if !self.exited {
                // While the leader lives, whatever it started hangs below it, in whichever session.
                self.members = processes::descendants(&[self.leader()]);
            }
        }
        self.started.leader.signal_group(Signal::KILL);
        self.members.iter().for_each(Process::kill);
    }
}

/// Whose an orphan is.
enum Owner {
    Execution(ExecutionId),
    /// An execution that has ended.
    Nobody,
    /// It hides: it may be of any execution that ran when it was started.
    Hidden,
}

pub(super) struct Table {
    /// Tells the marks of this keeper from those of another.
    name: String,
    executions: HashMap<ExecutionId, Execution>,
    orphans: Children,
    epoll: OwnedFd,
    control: OwnedFd,
    /// Wakes the thread that waits without an end while there is nothing to look after.
    wake: OwnedFd,
    /// Reports that did not fit into the socket: at most three for each execution.
    backlog: VecDeque<Report>,
    look: Duration,
    /// Whether orphans were there at the last look.
    watched: bool,
    closing: bool,
}

impl Table {
    /// An empty table; made by the thread that orphans are handed to.
    pub(super) fn new(name: String, epoll: OwnedFd, control: OwnedFd, wake: OwnedFd) -> Self {
        Self {
            name,
            executions: HashMap::new(),
            orphans: Children::of_this_thread(),
            epoll,
            control,
            wake,
            backlog: VecDeque::new(),
            look: FIRST_LOOK,
            watched: false,
            closing: false,
        }
    }

    /// The mark of an execution, as a variable.
    pub(super) fn mark(&self, id: ExecutionId) -> String {
        format!("{MARK}={}.{id}", self.name)
    }

    pub(super) const fn is_closing(&self) -> bool {
        self.closing
    }

    /// How long nothing has to be done without a message; none for ever.
    pub(super) fn idle_for(&self, now: BootInstant) -> Option<Duration> {
        if self.executions.values().any(|execution| execution.killing) {
            return Some(self.look);
        }
        let next = self.executions.values().filter_map(Execution::next_look).min();
        let next = next.map(|at| at.since(now).min(IDLE_LOOK));
        if self.watched { next.or(Some(IDLE_LOOK)) } else { next }
    }

    /// Enters a process that was started, unless it is too late for it: then it is killed.
    pub(super) fn enter(&mut self, id: ExecutionId, terms: Terms, started: Started) {
        let watch = epoll::EventData::new_u64(id);
        let watched = epoll::add(&self.epoll, &started.pidfd, watch, epoll::EventFlags::IN);
        if self.closing || self.executions.contains_key(&id) {
            // Dropped as it is: it is killed.
            return self.report(Report::Failed(id, wire::Failure::TooLate));
        }
        if let Err(error) = watched {
            return self.report(Report::Failed(id, wire::Failure::System(error.raw_os_error())));
        }
        let execution = Execution {
            terms,
            started,
            kill_at: None,
            killing: false,
            fenced: false,
            exited: false,
            members: Vec::new(),
        };
        if self.executions.is_empty() {
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
        self.executions.insert(id, execution);
        self.report(Report::Started(id));
    }

    /// Ends what is no longer trusted. Called before anything is read, so that whatever was frozen
    /// together with this process is dead before it is heard.
    pub(super) fn enforce(&mut self, now: BootInstant) {
        let mut killed = false;
        for execution in self.executions.values_mut() {
            let terms = &execution.terms;
            if execution.killing || now < terms.trusted_until {
                continue;
            }
            execution.fenced |= !execution.exited;
            let kill_at = terms.trusted_until + terms.grace;
            if now >= kill_at {
                execution.kill();
                killed = true;
            } else if execution.kill_at.is_none() {
                execution.kill_at = Some(kill_at);
                execution.started.leader.signal_group(Signal::TERM);
                execution.started.leader.signal_group(Signal::CONT);
            }
        }
        if killed {
            self.look = FIRST_LOOK;
        }
    }

    /// The thread that looks after executions is awake.
    pub(super) fn woken(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    /// Does what the worker asks for.
    pub(super) fn obey(&mut self, order: Order) {
        match order {
            Order::Extend(lease, until) => {
                let of_lease = self.executions.values_mut().filter(|e| e.terms.lease == lease);
                // A deadline that has passed is not moved any more.
                for execution in of_lease.filter(|e| e.kill_at.is_none() && !e.killing) {
                    execution.terms.trusted_until = execution.terms.trusted_until.max(until);
                }
            }
            Order::Terminate(id) => {
                if let Some(execution) = self.executions.get(&id) {
                    execution.started.leader.signal_group(Signal::TERM);
                    execution.started.leader.signal_group(Signal::CONT);
                }
            }
            Order::End(id) => {
                if let Some(execution) = self.executions.get_mut(&id) {
                    execution.kill();
                    self.look = FIRST_LOOK;
                }
            }
        }
    }

    /// Looks at an execution whose leader may have exited.
    pub(super) fn leader_exited(&mut self, id: ExecutionId) {
        let Some(execution) = self.executions.get_mut(&id) else { return };
        if execution.exited || !execution.started.leader.has_exited() {
            return;
        }
        execution.exited = true;
        // A zombie stays readable.
        let _ = epoll::delete(&self.epoll, &execution.started.pidfd);
        let killing = execution.killing;
        self.look_after();
        if !killing && self.executions.contains_key(&id) {
            self.report(Report::Exited(id));
        }
    }

    /// Reaps what has ended, kills what must not live, and reports the executions that are gone.
    pub(super) fn look_after(&mut self) {
        let left = self.orphans_by_owner();
        self.watched = !left.is_empty();
        let exited = self.executions.iter().filter(|(_, execution)| execution.exited);
        let exited: Vec<ExecutionId> = exited.map(|(id, _)| *id).collect();
        for id in exited {
            let mine = left.iter().filter(|(owner, _)| *owner == Some(id)).map(|(_, pid)| *pid);
            let mine: Vec<Pid> = mine.collect();
            if mine.is_empty() {
                self.gone(id);
                // One that hides may have nobody left now that it could belong to.
                self.watched = !left.is_empty() && !self.orphans_by_owner().is_empty();
            } else if let Some(execution) = self.executions.get_mut(&id)
                && execution.killing
            {
                // What they have started hides nowhere once they are dead, but may have hidden before.
                execution.members = processes::descendants(&mine);
                execution.kill();
                mine.into_iter().for_each(processes::kill_child);
            }
        }
        self.look = (self.look * 2).min(LAST_LOOK);
    }

    /// The living orphans, and the execution that each belongs to; those of nobody are killed.
    fn orphans_by_owner(&mut self) -> Vec<(Option<ExecutionId>, Pid)> {
        let executions = &self.executions;
        let known = |pid| executions.values().any(|execution| execution.leader() == pid);
        let orphans = self.orphans.list(known);
        let mut left = Vec::new();
        for pid in orphans {
            let reap = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            if !matches!(waitid(WaitId::Pid(pid), reap), Ok(None)) {
                continue;
            }
            let owner = match Process::read(pid).map_or(Owner::Nobody, |p| self.owner(&p)) {
                Owner::Execution(id) => Some(id),
                Owner::Hidden => None,
                Owner::Nobody => {
                    processes::kill_child(pid);
                    None
                }
            };
            left.push((owner, pid));
        }
        left
    }

    fn owner(&self, orphan: &Process) -> Owner {
        let named = self.executions.iter().find(|(_, execution)| {
            let leader = execution.leader().as_raw_nonzero().get();
            orphan.session == leader
                || orphan.group == leader
                || execution.members.iter().any(|member| member.id == orphan.id)
        });
        if let Some((id, _)) = named {
            return Owner::Execution(*id);
        }
        let mark = orphan.variable(MARK);
        let of_ours = mark.as_deref().and_then(|mark| mark.split_once('.'));
        if let Some((_, id)) = of_ours.filter(|(name, _)| *name == self.name) {
            let id = id.parse().ok().filter(|id| self.executions.contains_key(id));
            return id.map_or(Owner::Nobody, Owner::Execution);
        }
        let (_, started) = orphan.id;
        let suspects = self.executions.values();
        if suspects.into_iter().any(|execution| execution.terms.started_tick <= started) {
            Owner::Hidden
        } else {
            Owner::Nobody
        }
    }

    /// Nothing of it is left but a zombie.
    fn gone(&mut self, id: ExecutionId) {
        let Some(mut execution) = self.executions.remove(&id) else { return };
        let exit = match execution.started.leader.reap(WaitIdOptions::NOHANG) {
            _ if execution.fenced => Exit::Fenced,
            Ok(Some(exit)) => exit,
            // Somebody else has taken its status, which nobody can.
            Ok(None) | Err(_) => Exit::Signal(libc::SIGKILL),
        };
        self.report(Report::Gone(id, exit));
    }

    /// Tells the worker; what does not fit waits until it does.
    pub(super) fn report(&mut self, report: Report) {
        self.backlog.push_back(report);
        if self.backlog.len() == 1 {
            self.flush();
        }
    }

    /// Sends what waits.
    pub(super) fn flush(&mut self) {
        let had = self.backlog.len();
        while let Some(report) = self.backlog.front() {
            match wire::send_report(&self.control, *report) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // Sent; or the worker has gone, which is heard elsewhere.
                Ok(()) | Err(_) => drop(self.backlog.pop_front()),
            }
        }
        if had > 1 || !self.backlog.is_empty() {
            let mut interest = epoll::EventFlags::IN;
            interest.set(epoll::EventFlags::OUT, !self.backlog.is_empty());
            let control = epoll::EventData::new_u64(super::CONTROL);
            let _ = epoll::modify(&self.epoll, self.control.as_fd(), control, interest);
        }
    }

    /// Lets nothing be entered any more and kills everything; says whether all of it is gone, down
    /// to the last descendant: this process has no children.
    pub(super) fn close(&mut self) -> bool {
        if !self.closing {
            self.closing = true;
            let executions = self.executions.values();
            executions.for_each(|execution| execution.started.leader.signal_group(Signal::KILL));
        }
        let executions = &self.executions;
        let known = |pid| executions.values().any(|execution| execution.leader() == pid);
        self.orphans.list(known).into_iter().for_each(processes::kill_child);
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, _))) => {
                    let mut executions = self.executions.values_mut();
                    if let Some(execution) = executions.find(|e| e.leader() == pid) {
                        execution.started.leader.disown();
                    }
                }
                Ok(None) => return false,
                Err(Errno::INTR) => {}
                Err(_) => return true,
            }
        }
    }
}
