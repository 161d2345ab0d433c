//! The environment of a command: what the queue names, and what says which item this is.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::Arc;

use time::UtcOffset;
use time::format_description::well_known::Rfc3339;

use super::InvalidCommand;
use crate::check::Directories;
use crate::execute::Job;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What the service manager says to the worker alone, and what the executor sets itself.
const RESERVED: [&str; 9] = [
    "CREDENTIALS_DIRECTORY",
    "LISTEN_FDNAMES",
    "LISTEN_FDS",
    "LISTEN_PID",
    "NOTIFY_SOCKET",
    "TMPDIR",
    "TRACEPARENT",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
];

/// The part of the environment that all executions of a queue share.
#[derive(Debug)]
pub(super) struct Environment {
    shared: Vec<CString>,
    path: OsString,
}

impl Environment {
    pub(super) fn new(
        set: &BTreeMap<String, String>,
        pass: &[String],
        worker_env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, InvalidCommand> {
        for name in set.keys().chain(pass) {
            check_name(name)?;
        }
        if let Some(value) = set.values().find(|value| value.contains('\0')) {
            return Err(InvalidCommand::Nul(value.clone()));
        }
        let mut variables: BTreeMap<OsString, OsString> =
            BTreeMap::from([("PATH".into(), DEFAULT_PATH.into())]);
        let passed = |name: &OsStr| pass.iter().any(|wanted| name == wanted.as_str());
        variables.extend(worker_env.into_iter().filter(|(name, _)| passed(name)));
        variables.extend(set.iter().map(|(name, value)| (name.into(), value.into())));
        let shared = variables.iter().map(|(name, value)| variable(name, value)).collect();
        let path = variables.remove(OsStr::new("PATH")).unwrap_or_default();
        Ok(Self { shared, path })
    }

    /// Where the program may be: `name` itself when it is a path, else below every absolute entry
    /// of the command's own `PATH`. Relative entries are left out: they would lead into a directory
    /// that item data is written to.
    pub(super) fn programs(&self, name: &str) -> Arc<[CString]> {
        let paths = if name.contains('/') {
            vec![Path::new(name).to_owned()]
        } else {
            std::env::split_paths(&self.path)
                .filter(|folder| folder.is_absolute())
                .map(|folder| folder.join(name))
                .collect()
        };
        let text = |path: std::path::PathBuf| {
            CString::new(path.into_os_string().into_vec()).expect("both parts came without NUL")
        };
        paths.into_iter().map(text).collect()
    }

    /// The whole environment of one execution.
    pub(super) fn of(
        &self,
        job: &Job,
        scratch: &Path,
        workspace: Option<&Directories>,
    ) -> Vec<CString> {
        let deadline = job.deadline.to_offset(UtcOffset::UTC).format(&Rfc3339);
        let own = [
            ("HOLDFAST_BATCH_ID", job.item.batch().to_string()),
            ("HOLDFAST_KEY", job.key.clone()),
            ("HOLDFAST_POSITION", job.item.position().to_string()),
            ("HOLDFAST_ATTEMPT", job.attempt.to_string()),
            ("HOLDFAST_LEASE_ID", job.lease.to_string()),
            ("HOLDFAST_TOKEN", job.token.to_string()),
            ("HOLDFAST_DEADLINE", deadline.expect("years have four digits until 9999")),
        ];
        let mut all = self.shared.clone();
        all.extend(own.iter().map(|(name, value)| variable(name.as_ref(), value.as_ref())));
        if let Some(Directories { workspace, outputs, uploads }) = workspace {
            let named = [
                ("HOLDFAST_WORKSPACE", workspace),
                ("HOLDFAST_OUTPUTS", outputs),
                ("HOLDFAST_UPLOADS", uploads),
            ];
            all.extend(named.map(|(name, path)| variable(name.as_ref(), path.as_ref())));
        }
        if !job.criteria.is_empty() {
            // As JSON it has no NUL, and nothing in it can pass for another variable.
            let criteria = serde_json::Value::from(job.criteria.as_slice()).to_string();
            all.push(variable("HOLDFAST_CRITERIA".as_ref(), criteria.as_ref()));
        }
        if let Some(context) = &job.traceparent {
            all.push(variable("TRACEPARENT".as_ref(), context.as_ref()));
        }
        all.push(variable("TMPDIR".as_ref(), scratch.as_os_str()));
        all
    }
}

fn check_name(name: &str) -> Result<(), InvalidCommand> {
    if name.is_empty() || name.contains(['=', '\0']) {
        return Err(InvalidCommand::VariableName(name.to_owned()));
    }
    if name.starts_with("HOLDFAST_") || RESERVED.contains(&name) {
        return Err(InvalidCommand::ReservedVariable(name.to_owned()));
    }
    Ok(())
}

fn variable(name: &OsStr, value: &OsStr) -> CString {
    let text = [name.as_bytes(), b"=", value.as_bytes()].concat();
    CString::new(text).expect("settings are checked, keys and paths hold no NUL")
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::super::tests::job;
    use super::*;

    fn environment(set: &[(&str, &str)], pass: &[&str]) -> Result<Environment, InvalidCommand> {
        let set = set.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let pass: Vec<_> = pass.iter().map(|&name| name.to_owned()).collect();
        let worker = [("PATH", "/opt/bin:rel::/bin"), ("LANG", "C"), ("SECRET", "s")];
        Environment::new(&set, &pass, worker.map(|(name, value)| (name.into(), value.into())))
    }

    fn lines(environment: &Environment, job: &Job) -> Vec<String> {
        let all = environment.of(job, Path::new("/scratch"), None);
        all.into_iter().map(|line| line.into_string().unwrap()).collect()
    }

    #[test]
    fn only_what_is_named_is_passed_and_the_item_is_told() {
        let environment = environment(&[("A", "1=2"), ("LANG", "en")], &["LANG", "UNSET"]).unwrap();
        let job = Job {
            deadline: datetime!(2026-01-02 03:04:05.5 +2),
            traceparent: Some("00-trace".to_owned()),
            ..job("1")
        };
        assert_eq!(
            lines(&environment, &job),
            [
                "A=1=2",
                "LANG=en",
                &format!("PATH={DEFAULT_PATH}"),
                &format!("HOLDFAST_BATCH_ID={}", job.item.batch()),
                "HOLDFAST_KEY=the key",
                "HOLDFAST_POSITION=7",
                "HOLDFAST_ATTEMPT=2",
                &format!("HOLDFAST_LEASE_ID={}", job.lease),
                "HOLDFAST_TOKEN=9007199254740993",
                "HOLDFAST_DEADLINE=2026-01-02T01:04:05.5Z",
                "TRACEPARENT=00-trace",
                "TMPDIR=/scratch",
            ]
        );
    }

    #[test]
    fn without_a_trace_there_is_no_traceparent() {
        let lines = lines(&environment(&[], &[]).unwrap(), &job("1"));
        assert!(lines.iter().all(|line| !line.starts_with("TRACEPARENT")), "{lines:?}");
    }

    #[test]
    fn the_program_is_looked_up_in_the_command_s_own_path() {
        let found = |set: &[(&str, &str)], pass: &[&str], name: &str| -> Vec<String> {
            let programs = environment(set, pass).unwrap().programs(name);
            programs.iter().map(|path| path.to_str().unwrap().to_owned()).collect()
        };
        assert_eq!(found(&[], &["PATH"], "p"), ["/opt/bin/p", "/bin/p"]);
        assert_eq!(found(&[("PATH", "/one")], &["PATH"], "p"), ["/one/p"]);
        assert_eq!(found(&[("PATH", "")], &[], "p"), Vec::<String>::new());
        assert_eq!(found(&[], &[], "p").len(), 6);
        assert_eq!(found(&[], &[], "./p"), ["./p"]);
        assert_eq!(found(&[], &[], "/x/p"), ["/x/p"]);
    }

    #[test]
    fn names_that_are_ours_or_none_are_refused() {
        for name in ["", "A=B", "A\0"] {
            let refused = Err(InvalidCommand::VariableName(name.to_owned()));
            assert_eq!(environment(&[(name, "")], &[]).map(|_| ()), refused);
            assert_eq!(environment(&[], &[name]).map(|_| ()), refused);
        }
        for name in RESERVED.into_iter().chain(["HOLDFAST__DATABASE__URL", "HOLDFAST_KEY"]) {
            let refused = Err(InvalidCommand::ReservedVariable(name.to_owned()));
            assert_eq!(environment(&[(name, "")], &[]).map(|_| ()), refused);
            assert_eq!(environment(&[], &[name]).map(|_| ()), refused);
        }
        let nul = Err(InvalidCommand::Nul("v\0".to_owned()));
        assert_eq!(environment(&[("A", "v\0")], &[]).map(|_| ()), nul);
    }
}
