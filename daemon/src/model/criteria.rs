//! Acceptance criteria: normalization and neutralization (`acceptance.md` 1.1, 1.2).
