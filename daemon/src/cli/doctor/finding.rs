use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Severity {
    /// Good to know.
    Note,
    /// Will become a problem, or makes one worse.
    Warning,
    /// Stops work, or endangers results.
    Critical,
}

impl Severity {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

/// Something worth telling, with what it means and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// A name for programs; it does not change.
    pub(super) name: &'static str,
    pub(super) severity: Severity,
    /// What was found.
    pub(super) what: String,
    pub(super) meaning: &'static str,
    pub(super) remedy: String,
}

impl Finding {
    pub(super) fn new(
        name: &'static str,
        severity: Severity,
        what: impl Into<String>,
        meaning: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self { name, severity, what: what.into(), meaning, remedy: remedy.into() }
    }
}
